//! The seal of a data profile's file: a hash over every byte, so that damage is found before anything is decoded.
//!
//! It stands in the footer as `pages=HASH footer=HASH`. The first hash is over all bytes before the footer, the second
//! over the footer with this seal in it and its own place left out: the footer can be trusted without reading the rows.

use dflop_types::artifact::hex;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// Key of the seal in the footer's metadata.
pub(super) const KEY: &str = "dflop.seal";

const MAGIC: &[u8; 4] = b"PAR1";
const PAGES: &str = "pages=";
const FOOTER: &str = " footer=";
/// Characters of a hash.
const HASH: usize = 64;

/// Why a file is not sealed.
#[derive(Debug)]
pub(super) enum Broken {
    /// The operating system refused.
    Io(io::Error),
    /// It is of another kind, or damaged.
    Content(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What a writer puts under [`KEY`] until the file is sealed.
pub(super) fn blank() -> String {
    let zeros = "0".repeat(HASH);
    format!("{PAGES}{zeros}{FOOTER}{zeros}")
}

/// Seals a file that was written whole, with [`blank`] in its footer.
///
/// # Errors
/// Those of the file system, and [`Broken::Content`] where there is no blank seal.
pub(super) fn close(file: &mut File) -> Result<(), Broken> {
    let mut footer = Footer::read(file)?;
    let pages = hash_of_start(file, footer.start)?;
    footer.bytes[footer.pages_at..][..HASH].copy_from_slice(pages.as_bytes());
    let own = footer.own_hash();
    for (at, hash) in [(footer.pages_at, pages), (footer.own_at(), own)] {
        file.seek(SeekFrom::Start(footer.start + at as u64))?;
        file.write_all(hash.as_bytes())?;
    }
    Ok(())
}

/// Where the footer starts, if it is as it was sealed.
///
/// # Errors
/// [`Broken`].
pub(super) fn check_footer(file: &mut File) -> Result<Sealed, Broken> {
    let footer = Footer::read(file)?;
    let own_at = footer.own_at();
    if footer.bytes.get(own_at..own_at + HASH) != Some(footer.own_hash().as_bytes()) {
        return Err(Broken::Content("its footer is damaged: it is not what was sealed".to_owned()));
    }
    let pages = footer.bytes[footer.pages_at..][..HASH].to_vec();
    Ok(Sealed { start: footer.start, pages })
}

/// A footer that was checked, and the hash of what stands before it.
#[derive(Debug)]
pub(super) struct Sealed {
    start: u64,
    pages: Vec<u8>,
}

impl Sealed {
    /// `Ok` if the bytes before the footer are as they were sealed. *Complexity*: O(bytes).
    ///
    /// # Errors
    /// [`Broken`].
    pub(super) fn check_pages(&self, file: &mut File) -> Result<(), Broken> {
        if hash_of_start(file, self.start)?.as_bytes() == self.pages {
            return Ok(());
        }
        Err(Broken::Content("its rows are damaged: they are not what was sealed".to_owned()))
    }
}

/// The last part of a Parquet file, from its metadata on.
struct Footer {
    start: u64,
    bytes: Vec<u8>,
    /// Where the hash of the pages stands in `bytes`.
    pages_at: usize,
}

impl Footer {
    fn read(file: &mut File) -> Result<Self, Broken> {
        let content = |cause: &str| Broken::Content(cause.to_owned());
        let len = file.seek(SeekFrom::End(0))?;
        let mut first = [0; 4];
        let mut last = [0; 8];
        if len < 12 {
            return Err(Broken::Content(format!("it has {len} bytes, a Parquet file has at least 12")));
        }
        file.seek(SeekFrom::Start(0))?;
        file.read_exact(&mut first)?;
        file.seek(SeekFrom::Start(len - 8))?;
        file.read_exact(&mut last)?;
        if &first != MAGIC {
            return Err(content("it does not begin as a Parquet file does"));
        }
        if &last[4..] != MAGIC {
            return Err(content("it does not end as a Parquet file does: it was cut off"));
        }
        let metadata = u32::from_le_bytes([last[0], last[1], last[2], last[3]]);
        let start = (len - 12).checked_sub(metadata.into()).ok_or_else(|| {
            Broken::Content(format!("its footer claims {metadata} bytes, the file has {len}"))
        })? + 4;
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(len - start).read_to_end(&mut bytes)?;
        let size = PAGES.len() + HASH + FOOTER.len() + HASH;
        // The last one: what a person chose (names, paths) stands before it.
        let at = bytes.windows(size).rposition(|window| {
            window.starts_with(PAGES.as_bytes())
                && window[PAGES.len() + HASH..].starts_with(FOOTER.as_bytes())
        });
        let at = at.ok_or_else(|| content("it is a Parquet file without the seal of a data profile"))?;
        Ok(Self { start, bytes, pages_at: at + PAGES.len() })
    }

    /// Where the footer's own hash stands.
    const fn own_at(&self) -> usize {
        self.pages_at + HASH + FOOTER.len()
    }

    /// Hash of the footer without the place of that hash.
    fn own_hash(&self) -> String {
        let (before, rest) = self.bytes.split_at(self.own_at());
        let hash = Sha256::new().chain_update(before).chain_update(&rest[HASH..]);
        hex(&hash.finalize())
    }
}

fn hash_of_start(file: &mut File, len: u64) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut file = file.take(len);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}
