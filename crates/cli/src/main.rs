//! The plain binary: every verb but `profile model` and `train`, which need PyTorch, and `profile data` with a
//! `model.family`, which is a function of Python.

// The command line is the one place that talks.
#![allow(clippy::print_stderr)]

use std::process::ExitCode;

/// What this program starts itself with to render chat templates: see `dflop_data::render_templates_with`.
const SERVE: &str = "serve-chat-templates";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if arguments.len() == 2 && arguments[1] == SERVE {
        let served = dflop_data::serve_templates(std::io::stdin().lock(), std::io::stdout().lock());
        return ExitCode::from(u8::from(served.is_err()));
    }
    if let Ok(program) = std::env::current_exe() {
        dflop_data::render_templates_with(vec![program.into(), SERVE.into()]);
    }
    match dflop_cli::run(&arguments) {
        dflop_cli::Outcome::Done(status) => ExitCode::from(status),
        dflop_cli::Outcome::Python(request) => {
            let needs = if request.verb == "profile_data" {
                "calls the function of Python that `model.family` names"
            } else {
                "needs PyTorch"
            };
            eprintln!(
                "error: `dflop {}` {needs}, this is the plain binary\n\nhint: install the Python package (`make setup`) and run its `dflop`",
                request.verb.replace('_', " ")
            );
            ExitCode::from(2)
        }
    }
}
