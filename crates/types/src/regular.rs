//! Files that a person names, opened without a wait: only regular ones, since a pipe may never be written to and a
//! device may never end.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read as _, Result};
use std::path::Path;

/// The file at `path`, opened for reading, and what the system says of it. Links are followed.
///
/// # Errors
/// Those of the system; [`ErrorKind::InvalidInput`] where it is a directory, a device, a pipe or a socket.
pub fn open(path: &Path) -> Result<(File, Metadata)> {
    // Before it is opened: opening a pipe waits for its writer.
    check(&std::fs::metadata(path)?)?;
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    check(&metadata)?;
    Ok((file, metadata))
}

/// The bytes of the file at `path`, at most `bytes_max`.
///
/// # Errors
/// Those of [`open`]; [`ErrorKind::FileTooLarge`] where it has more bytes.
pub fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let (file, metadata) = open(path)?;
    let too_large = || Error::new(ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes"));
    if metadata.len() > bytes_max {
        return Err(too_large());
    }
    // Files of `/proc` have no length: what is read decides.
    let mut bytes = Vec::with_capacity(metadata.len() as usize);
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(too_large());
    }
    Ok(bytes)
}

/// The text of the file at `path`, at most `bytes_max` bytes.
///
/// # Errors
/// Those of [`read`]; [`ErrorKind::InvalidData`] where it is not UTF-8.
pub fn read_to_string(path: &Path, bytes_max: u64) -> Result<String> {
    String::from_utf8(read(path, bytes_max)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let said = match error.as_bytes() {
            // A data profile where another file is asked for.
            [b'P', b'A', b'R', b'1', ..] => "it is a Parquet file, must be text".to_owned(),
            bytes => format!("byte {at} is {:#04x}, must be text in UTF-8", bytes[at]),
        };
        Error::new(ErrorKind::InvalidData, said)
    })
}

fn check(metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let found = if metadata.is_dir() { "a directory" } else { "a device, pipe or socket" };
    Err(Error::new(ErrorKind::InvalidInput, format!("it is {found}, must be a regular file")))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A pipe that nobody writes to, a device without an end, a directory: an answer at once, which says what it is.
    #[test]
    fn what_may_never_end_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        let said = |path: &Path| read(path, 1 << 20).unwrap_err().to_string();
        assert_eq!(said(&pipe), "it is a device, pipe or socket, must be a regular file");
        assert_eq!(said(&link), "it is a device, pipe or socket, must be a regular file");
        assert_eq!(said(Path::new("/dev/zero")), "it is a device, pipe or socket, must be a regular file");
        assert_eq!(said(directory.path()), "it is a directory, must be a regular file");
        let missing = read(&directory.path().join("none"), 9).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn no_more_is_read_than_may_be() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        assert_eq!(read(&path, 3).unwrap_err().to_string(), "it has more than 3 bytes");
        std::fs::write(&path, b"\xff").unwrap();
        let binary = read_to_string(&path, 3).unwrap_err();
        assert_eq!(
            (binary.kind(), binary.to_string().as_str()),
            (ErrorKind::InvalidData, "byte 0 is 0xff, must be text in UTF-8")
        );
        std::fs::write(&path, b"PAR1\xff").unwrap();
        assert_eq!(read_to_string(&path, 9).unwrap_err().to_string(), "it is a Parquet file, must be text");
    }
}
