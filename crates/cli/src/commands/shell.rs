//! `dflop completions` and `dflop man`: what a shell and `man` want to know, made from the same texts as `--help`.

use crate::Failure;
use crate::args::{Cli, Completions, Man};
use clap::CommandFactory;
use clap_complete::Shell;
use dflop_types::artifact;
use std::path::Path;

pub(super) fn completions(arguments: &Completions) {
    out!("{}", script(arguments.shell));
}

fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "dflop", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

pub(super) fn man(arguments: &Man) -> Result<(), Failure> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let num = write_page(&command, "dflop", &arguments.out)?;
    outln!("wrote {num} man pages to {}", arguments.out.display());
    Ok(())
}

/// Writes the page of a command and those of its verbs, `dflop-profile-data.1` for `dflop profile data`; returns how
/// many they are.
fn write_page(command: &clap::Command, name: &str, out: &Path) -> Result<usize, Failure> {
    let mut page = Vec::new();
    let path = out.join(format!("{name}.1"));
    clap_mangen::Man::new(command.clone())
        .title(name)
        .render(&mut page)
        .expect("memory takes what is written");
    artifact::write_text(&path, "man page", &String::from_utf8_lossy(&page))?;
    let mut num = 1;
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        num += write_page(verb, &format!("{name}-{}", verb.get_name()), out)?;
    }
    Ok(num)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn every_verb_has_a_page_and_is_completed() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("man1");
        man(&Man { out: out.clone() }).unwrap();
        let page = fs::read_to_string(out.join("dflop-profile-data.1")).unwrap();
        assert!(page.starts_with(".ie") && page.contains(".SH SYNOPSIS"), "{page}");
        for verb in Cli::command().get_subcommands().map(|verb| verb.get_name().to_owned()) {
            assert!(out.join(format!("dflop-{verb}.1")).is_file(), "{verb}");
            for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
                assert!(script(shell).contains(&verb), "{verb} {shell}");
            }
        }
    }

    /// What leaves the program is cleaned of control characters and secrets; a script has neither.
    #[test]
    fn the_scripts_pass_through_stdout_unchanged() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert_eq!(dflop_types::shown_lines(&script(shell)), script(shell));
        }
    }
}
