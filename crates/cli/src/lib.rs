//! Run: arguments in, exit status out.
//!
//! Every verb reads a few files and writes one. Results go to stdout, messages to stderr. The verbs that need
//! PyTorch, `profile model`, `check`, `train` and `export`, are parsed and checked here and handed to Python as a [`Request`]; so is
//! `profile data` where `model.family` names a function of Python.
//!
//! Exit status, chosen here only: 0 done; 1 the inputs are valid but the answer is no; 2 wrong arguments or
//! files, or an internal error.

#[macro_use]
mod speech;
mod advice;
mod args;
mod arms;
mod commands;
mod comparison;
pub mod config;
pub mod costs;
mod diagnostics;
mod measured;
mod mistyped;
mod runs;
mod steps;

use clap::{Command, CommandFactory, FromArgMatches};
use dflop_data::family::GivenFamily;
use std::ffi::OsString;

pub use diagnostics::Failure;

/// What a call of the command line comes to.
#[derive(Debug)]
pub enum Outcome {
    /// It is done, with this exit status.
    Done(u8),
    /// Python must go on with this.
    Python(Request),
}

/// What Python is asked to do.
#[derive(Debug, serde::Serialize)]
pub struct Request {
    /// `profile_data` (import `model.family` and run the command line again with it), `profile_model`, `check`, `train` or `export`.
    pub verb: String,
    /// The arguments, checked, with paths resolved; a JSON object.
    pub arguments: serde_json::Value,
}

/// The command line's grammar. A number below zero is the value of its flag, whose rule then says what is wrong with it.
fn command() -> Command {
    fn with_numbers(command: Command) -> Command {
        let command = command.mut_args(|argument| {
            let takes_values = argument.get_action().takes_values();
            argument.allow_negative_numbers(takes_values)
        });
        let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
        verbs.into_iter().fold(command, |command, verb| command.mut_subcommand(verb, with_numbers))
    }
    with_numbers(args::Cli::command())
}

/// Runs the command line: `arguments[0]` is the program's name.
pub fn run<A: Into<OsString> + Clone>(arguments: &[A]) -> Outcome {
    run_with(arguments, None)
}

/// Runs the command line with the function of Python that `model.family` names, where it has been imported.
pub fn run_with<A: Into<OsString> + Clone>(arguments: &[A], family: Option<&GivenFamily>) -> Outcome {
    let parsed = command().try_get_matches_from(arguments.iter().cloned());
    let cli = match parsed.and_then(|matches| args::Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            // If printing fails because the pipe is closed, nobody reads what we would report.
            let _ = error.print();
            let words: Vec<String> = arguments
                .iter()
                .map(|word| Into::<OsString>::into(word.clone()).to_string_lossy().into_owned())
                .collect();
            if let Some(hint) = mistyped::hint(&command(), &words, &error) {
                talk!("\nhint: {hint}");
            }
            return Outcome::Done(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let answer = commands::run(cli.verb, family);
    match answer.and_then(|outcome| speech::end().map(|()| outcome)) {
        Ok(outcome) => outcome,
        Err(failure) => {
            talk!("{}", failure.render().trim_end());
            Outcome::Done(u8::try_from(failure.status).unwrap_or(2))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_below_zero_is_a_value_that_its_flag_refuses() {
        for (arguments, expected) in [
            (["dflop", "train", "--steps", "-1"], "invalid value '-1' for '--steps <N>'"),
            (["dflop", "plan", "--sampled-batches", "-3"], "invalid value '-3' for '--sampled-batches <N>'"),
        ] {
            let error = command().try_get_matches_from(arguments).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
