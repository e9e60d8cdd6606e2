//! A file that takes another's name when it is whole.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file beside the one that it will replace; removed when it is dropped before that.
#[derive(Debug)]
pub(crate) struct Neighbour {
    path: PathBuf,
    target: PathBuf,
    is_taken: bool,
}

impl Neighbour {
    /// A new file for `target`, told apart by `role` from others for the same one; the directory is made if it is
    /// missing.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn create(target: &Path, role: &str) -> io::Result<(Self, File)> {
        let directory = target.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(directory)?;
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{role}{}.tmp", std::process::id()));
        let path = directory.join(name);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        Ok((Self { path, target: target.to_owned(), is_taken: false }, file))
    }

    /// Gives it its name; it is synced by then.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn take(mut self) -> io::Result<()> {
        std::fs::rename(&self.path, &self.target)?;
        self.is_taken = true;
        Ok(())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        if !self.is_taken {
            // It is ours alone; that it may not exist is no second error.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
