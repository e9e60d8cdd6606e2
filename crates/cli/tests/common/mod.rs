//! A session at the command line, and its snapshots.

// Each test crate uses a part of it; `allow-unwrap-in-tests` knows test functions, not what they share.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The files of a demo of 48 samples by their paths in its directory: made once, as each test begins with them.
static DEMO: LazyLock<Vec<(PathBuf, Vec<u8>)>> = LazyLock::new(|| {
    let session = Session { directory: tempfile::tempdir().unwrap() };
    let made = session.dflop(&["demo-data", "demo", "--samples", "48"]);
    assert!(made.contains("status: 0"), "{made}");
    let mut files = Vec::new();
    read_below(session.directory.path(), Path::new("demo"), &mut files);
    files
});

/// The pipeline of the demo's two ranks, and the hash of its data profile. It is searched for once, as that takes longer than all
/// else in the tests that begin with it.
static PIPELINE: LazyLock<(String, String)> = LazyLock::new(|| {
    let session = Session::measured();
    let made = session.dflop(&["plan", "-c", "demo/dflop.yaml", "--only", "colocated=false"]);
    assert!(made.contains("status: 0"), "{made}");
    (fs::read_to_string(session.path("demo/plan.json")).unwrap(), session.data_profile())
});

fn read_below(root: &Path, folder: &Path, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = folder.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            read_below(root, &path, files);
        } else {
            files.push((path, fs::read(entry.path()).unwrap()));
        }
    }
}

/// A directory with a small demo in it, as the binary makes it.
pub(crate) struct Session {
    pub(crate) directory: tempfile::TempDir,
}

impl Session {
    pub(crate) fn new() -> Self {
        let session = Self { directory: tempfile::tempdir().unwrap() };
        for (path, bytes) in DEMO.iter() {
            let path = session.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        session
    }

    /// With both profiles.
    pub(crate) fn measured() -> Self {
        let session = Self::new();
        session.profile_data();
        session.record_model_profile();
        session
    }

    /// With both profiles, and the plan of a pipeline.
    pub(crate) fn planned() -> Self {
        let session = Self::measured();
        let (plan, data_profile) = &*PIPELINE;
        // The data lie in another folder, which a data profile names.
        let plan = plan.replace(data_profile, &session.data_profile());
        fs::write(session.path("demo/plan.json"), plan).unwrap();
        session
    }

    /// Hash of the data profile, as in what is made from it.
    fn data_profile(&self) -> String {
        dflop_data::table::read(&self.path("demo/data_profile.parquet")).unwrap().content_hash()
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Status, stdout and stderr, as a person sees them.
    pub(crate) fn dflop(&self, arguments: &[&str]) -> String {
        self.dflop_in("", arguments)
    }

    /// As [`Self::dflop`], started in a directory of the session.
    pub(crate) fn dflop_in(&self, directory: &str, arguments: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_dflop"))
            .args(arguments)
            .current_dir(self.directory.path().join(directory))
            .env("COLUMNS", "100")
            .env_remove("RANK")
            .output()
            .unwrap();
        format!(
            "$ dflop {}\nstatus: {}\n--- stdout\n{}--- stderr\n{}",
            arguments.join(" "),
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    }

    pub(crate) fn profile_data(&self) {
        let made = self.dflop(&["profile", "data", "-c", "demo/dflop.yaml"]);
        assert!(made.contains("status: 0"), "{made}");
    }

    /// The recorded profile of the demo model, as if measured here.
    pub(crate) fn record_model_profile(&self) {
        let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/profiles/demo_cpu.json");
        fs::copy(recorded, self.path("demo/model_profile.json")).unwrap();
    }

    /// Makes the recorded profile that of another device.
    pub(crate) fn set_device(&self, kind: &str, name: &str) {
        self.edit("demo/model_profile.json", |text| {
            let mut profile: serde_json::Value = serde_json::from_str(&text).unwrap();
            profile["device"]["kind"] = kind.into();
            profile["device"]["name"] = name.into();
            profile.to_string()
        });
    }

    pub(crate) fn edit(&self, name: &str, change: impl FnOnce(String) -> String) {
        let path = self.path(name);
        let text = fs::read_to_string(&path).unwrap();
        let changed = change(text.clone());
        assert_ne!(text, changed, "the edit of {name} changes nothing");
        fs::write(path, changed).unwrap();
    }

    /// Marks the steps of the demo's run as `dflop rehearse` marks those that it writes.
    pub(crate) fn rehearse_the_run(&self) {
        self.edit("demo/run/metrics.jsonl", |text| text.replace("{\"", "{\"is_rehearsed\":true,\""));
    }
}

/// The snapshot with what differs between machines and runs masked.
pub(crate) fn snapshot(name: &str, text: &str) {
    insta::with_settings!({
        snapshot_path => "../snapshots",
        prepend_module_to_snapshot => false,
        filters => vec![
            (r"/[^ `]*\.tmp[A-Za-z0-9]+", "[TMP]"),
            (r"sha256:[0-9a-f]{64}", "sha256:[HASH]"),
            (r"which has \d+ cores", "which has [N] cores"),
            (r"\d[\d,]*(\.\d+)? (s|ms|us)\b", "[TIME]"),
            (r"[\d.]+ samples/s", "[RATE] samples/s"),
        ],
        omit_expression => true,
    }, {
        insta::assert_snapshot!(name, text);
    });
}
