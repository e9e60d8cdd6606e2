//! A file that takes another's name when it is whole: a write that is interrupted leaves the old file as it was.

use std::fs::{DirEntry, File};
use std::io;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file beside the one that it will replace; removed when it is dropped before that.
///
/// It is locked while it is written. So the next write to the same place can tell the file of a process that was killed,
/// which nobody has locked, from that of one that is still at work, and removes it.
#[derive(Debug)]
pub struct Neighbour {
    file: NamedTempFile,
    target: PathBuf,
}

impl Neighbour {
    /// A new file for `target`, named `TARGET.ROLE` and six characters; `role` tells apart several files for one target,
    /// and is empty or ends with a stop. Makes the directory if it is missing, and removes what killed processes left.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn create(target: &Path, role: &str) -> io::Result<(Self, File)> {
        let directory = target.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(directory)?;
        let mut prefix = target.file_name().unwrap_or_default().to_owned();
        prefix.push(format!(".{role}"));
        remove_abandoned(directory, &prefix.to_string_lossy());
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(SUFFIX);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            // As any other file: what the user's mask leaves of it.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        loop {
            let file = builder.tempfile_in(directory)?;
            // Some network file systems have no locks; nobody can lock there, so nobody removes the file either.
            let _ = file.as_file().lock();
            // Before we locked the file, another process may have thought it abandoned and removed it.
            if file.path().exists() {
                let handle = file.as_file().try_clone()?;
                return Ok((Self { file, target: target.to_owned() }, handle));
            }
        }
    }

    /// Gives it its name; it is synced by then.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn take(self) -> io::Result<()> {
        self.file.persist(&self.target).map(drop).map_err(|error| error.error)
    }
}

const SUFFIX: &str = ".tmp";

/// Characters that make a name unlike others: those of `tempfile`, or the number of a process in earlier versions.
fn is_unique_part(text: &str) -> bool {
    text.len() == 6 && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
        || !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Removes the files with this prefix that no process has locked. What cannot be removed stays: it harms nobody.
fn remove_abandoned(directory: &Path, prefix: &str) {
    let is_neighbour = |entry: &DirEntry| {
        let name = entry.file_name();
        let unique = name.to_str().and_then(|name| name.strip_prefix(prefix)?.strip_suffix(SUFFIX));
        unique.is_some_and(is_unique_part) && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten().filter(is_neighbour) {
        let Ok(file) = File::open(entry.path()) else { continue };
        if file.try_lock().is_ok() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn names(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_a_killed_process_left_goes_with_the_next_write() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let left = ["plan.json.Ab3x9Z.tmp", "plan.json.4711.tmp"];
        // Of other places, of another role, and of people.
        let kept = [
            "other.json.Ab3x9Z.tmp",
            "plan.json.mine.tmp",
            "plan.json.rows.Ab3x9Z.tmp",
            "plan.json.tmp",
            "plan.json.txt",
        ];
        for name in left.iter().chain(&kept) {
            std::fs::write(at(name), name).unwrap();
        }
        let (neighbour, mut file) = Neighbour::create(&at("plan.json"), "").unwrap();
        file.write_all(b"whole").unwrap();
        neighbour.take().unwrap();
        let mut expected = kept.map(str::to_owned).to_vec();
        expected.push("plan.json".to_owned());
        expected.sort();
        assert_eq!(names(directory.path()), expected);
        assert_eq!(std::fs::read(at("plan.json")).unwrap(), b"whole");
    }

    #[test]
    fn what_is_being_written_stays() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("plan.json");
        let (first, mut file) = Neighbour::create(&target, "").unwrap();
        let (second, mut other) = Neighbour::create(&target, "").unwrap();
        assert_eq!(names(directory.path()).len(), 2, "the second write left the first one's file alone");
        file.write_all(b"first").unwrap();
        other.write_all(b"second").unwrap();
        second.take().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"second");
        first.take().unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"first");
        drop(Neighbour::create(&target, "").unwrap());
        assert_eq!(names(directory.path()), ["plan.json"], "one that is given up goes by itself");
    }

    #[cfg(unix)]
    #[test]
    fn its_mode_is_that_of_any_new_file() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("usual"), "").unwrap();
        Neighbour::create(&at("ours"), "").unwrap().0.take().unwrap();
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode();
        assert_eq!(mode("ours"), mode("usual"));
    }
}
