//! What can be asked for the shell: completions and man pages.

use clap::Args;
use clap_complete::Shell;
use std::path::PathBuf;

/// Print the completions of a shell.
///
/// Put them where your shell looks for them. Then Tab completes verbs, options and their values in new shells:
///   bash: dflop completions bash > ~/.local/share/bash-completion/completions/dflop
///   zsh:  dflop completions zsh > a directory of $fpath, as _dflop
///   fish: dflop completions fish > ~/.config/fish/completions/dflop.fish
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// Write a man page for each verb.
///
/// Example: dflop man --out ~/.local/share/man/man1, then: man dflop-plan
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Man {
    /// The directory, made where it is missing; pages of the same name are replaced
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}
