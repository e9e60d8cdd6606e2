//! `dflop export`: checked here, carried out by Python.

use crate::args;
use crate::{Failure, Outcome, Request};
use serde_json::json;
use std::io;
use std::path::Path;

/// The request to write the weights of a run as a model directory.
pub(super) fn run(arguments: &args::Export) -> Result<Outcome, Failure> {
    let args::Export { run, out, .. } = arguments;
    if !run.join("checkpoints").is_dir() {
        return Err(Failure::new(
            format!("`{}` holds no checkpoints: there is no directory `checkpoints`", run.display()),
            Some(hint_of_run(run)),
        ));
    }
    let first = match std::fs::read_dir(out) {
        Ok(mut entries) => entries.next(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            return Err(Failure::new(
                format!("`{}`: {}, the model must be written there", out.display(), error.kind()),
                Some("choose another directory with `--out`".to_owned()),
            ));
        }
    };
    if let (Some(Ok(entry)), false) = (first, arguments.force) {
        return Err(Failure::new(
            format!("`{}` is not empty, it holds `{}`", out.display(), entry.file_name().display()),
            Some("choose another directory with `--out`, or pass `--force`".to_owned()),
        ));
    }
    Ok(Outcome::Python(Request {
        verb: "export".to_owned(),
        arguments: json!({
            "run": run,
            "out": out,
            "step": arguments.step,
            "dtype": arguments.dtype,
            "shard_bytes_max": arguments.shard_bytes_max,
            "adapter": arguments.adapter,
        }),
    }))
}

/// What to name in place of `named`, which is no run.
fn hint_of_run(named: &Path) -> String {
    let step = named.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-"));
    let of_checkpoint = named.parent().and_then(Path::parent).filter(|run| run.join("checkpoints").is_dir());
    match (of_checkpoint, step) {
        (Some(run), Some(step)) => {
            let run = if run.as_os_str().is_empty() { Path::new(".") } else { run };
            format!("it is a checkpoint: name its run, `dflop export {} --step {step}`", run.display())
        }
        _ if named.join("run/checkpoints").is_dir() => {
            format!("name the run in it, `dflop export {}`", named.join("run").display())
        }
        _ => "name the directory of a run of `dflop train` that wrote one (`checkpoint.every`)".to_owned(),
    }
}
