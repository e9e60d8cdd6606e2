//! What the bytes of a file, an object or a cell are read through.

use std::io::{Read, Seek};

/// Something that is read at any offset, by one thread.
pub trait ReadSeek: Read + Seek + Send {}
impl<T: Read + Seek + Send> ReadSeek for T {}
