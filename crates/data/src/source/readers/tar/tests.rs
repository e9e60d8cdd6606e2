use super::*;
use std::path::Path;

/// A header with a sound checksum.
fn header(name: &str, kind: u8, size: &[u8]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..124 + size.len()].copy_from_slice(size);
    block[148..156].fill(b' ');
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

/// A member with its padded body.
pub(in crate::source::readers) fn member(name: &str, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = header(name, kind, format!("{:011o}\0", body.len()).as_bytes());
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn read(bytes: &[u8]) -> Result<Vec<Member>, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tar");
    std::fs::write(&path, bytes).unwrap();
    let location = Location::Local(path);
    let members = || -> Result<Vec<Member>, DataError> {
        let mut tar = Tar::open(&location, &Stores::default())?;
        let mut members = Vec::new();
        while let Some(member) = tar.next()? {
            members.push(member);
        }
        Ok(members)
    };
    members().map_err(|error| error.to_string().replace(&location.to_string(), "a.tar"))
}

const END: [u8; 1024] = [0; 1024];

#[test]
fn long_names_and_sizes_of_every_kind_are_read() {
    let name = "d/".repeat(100) + "x.jpg";
    let mut base_256 = vec![0; 12];
    (base_256[0], base_256[11]) = (0x80, 3);
    let size = b"15 path=\xc3\xa9.jpg\n9 size=3\n";
    let bytes = [
        member("././@LongLink", b'L', name.as_bytes()),
        member("short", b'0', b"abc"),
        [header("big.jpg", b'0', &base_256), b"abc".to_vec(), vec![0; 509]].concat(),
        member("directory/", b'0', b""),
        member("directory", b'5', b""),
        member("pax", b'x', size),
        [header("other", b'0', b"00000000777\0"), vec![1; 512]].concat(),
        member("global", b'g', b"11 mtime=1\n"),
        member("caf\u{e9}.txt", 0, b""),
        END.to_vec(),
    ]
    .concat();
    let found = read(&bytes).unwrap();
    let found: Vec<_> = found.iter().map(|m| (m.name.as_str(), m.header, m.start, m.len)).collect();
    assert_eq!(
        found,
        [
            (name.as_str(), 0, 1536, 3),
            ("big.jpg", 2048, 2560, 3),
            ("\u{e9}.jpg", 4096, 5632, 3),
            ("caf\u{e9}.txt", 7168, 7680, 0),
        ]
    );
}

#[test]
fn names_that_are_not_utf_8_stay_apart() {
    assert_eq!(
        (text(b"caf\xe9.jpg"), text(b"caf\xe8.jpg")),
        ("caf\\xe9.jpg".to_owned(), "caf\\xe8.jpg".to_owned())
    );
}

#[test]
fn what_cannot_be_read_is_named_with_its_place() {
    let good = member("a.jpg", b'0', b"abc");
    let mut corrupt = good.clone();
    corrupt[3] ^= 1;
    let errors = [
        vec![],
        b"no tar".repeat(100),
        [good.as_slice(), &corrupt, &END].concat(),
        good.clone(),
        [good.as_slice(), &[0; 100]].concat(),
        good[..514].to_vec(),
        [header("a.jpg", b'0', b"77777777777\0"), END.to_vec()].concat(),
        [header("a.jpg", b'0', &[0xff; 12]), END.to_vec()].concat(),
        [header("a.jpg", b'0', b"9\0"), END.to_vec()].concat(),
        [member("a.jpg", b'1', b""), END.to_vec()].concat(),
        [member("a.jpg", b'2', b""), END.to_vec()].concat(),
        [member("a.jpg", b'S', b""), END.to_vec()].concat(),
        [member("a.jpg", b'4', b""), END.to_vec()].concat(),
        [member("p", b'x', b"30 GNU.sparse.major=1\n"), good.clone(), END.to_vec()].concat(),
        [member("p", b'x', b"22 GNU.sparse.major=1\n"), good.clone(), END.to_vec()].concat(),
        [member("p", b'x', b"10 size=x\n"), good.clone(), END.to_vec()].concat(),
        [member("p", b'g', b"10 path=x\n"), good.clone(), END.to_vec()].concat(),
        [member("p", b'L', b"name"), END.to_vec()].concat(),
        [member("p", b'L', &vec![b'a'; (1 << 20) + 1]), good.clone(), END.to_vec()].concat(),
        [good.clone(), END.to_vec(), good.clone(), END.to_vec()].concat(),
    ]
    .map(|bytes| read(&bytes).unwrap_err());
    insta::assert_snapshot!(errors.join("\n"), @r"
    `a.tar`: at byte 0: it is empty, must be a tar archive
    `a.tar`: at byte 0: no tar header stands here (its checksum does not fit): corrupt, or no tar archive
    `a.tar`: at byte 1024: no tar header stands here (its checksum does not fit): corrupt, or no tar archive
    `a.tar`: at byte 1024: the archive ends without its end mark of zero bytes: it is cut off
    `a.tar`: at byte 1024: a header has 512 bytes, only 100 are left: it is cut off
    `a.tar`: at byte 0: `a.jpg` has 3 bytes, only 2 follow its header: the archive is cut off
    `a.tar`: at byte 0: `a.jpg` has 8589934591 bytes, only 1024 follow its header: the archive is cut off
    `a.tar`: at byte 0: the size of `a.jpg` is past 2^62 bytes
    `a.tar`: at byte 0: the size of `a.jpg` is `9`, must be an octal number
    `a.tar`: at byte 0: `a.jpg` is a hard link: its bytes are elsewhere, shards must hold files
    `a.tar`: at byte 0: `a.jpg` is a symbolic link: its bytes are elsewhere, shards must hold files
    `a.tar`: at byte 0: `a.jpg` is a sparse member, shards must hold files as they are
    `a.tar`: at byte 0: `a.jpg` is of type `4`, must be a file
    `a.tar`: at byte 0: a pax header must hold lines of `length key=value`
    `a.tar`: at byte 0: a sparse member, shards must hold files as they are
    `a.tar`: at byte 0: `size` in a pax header is `x`, must be a number
    `a.tar`: at byte 0: a global pax header sets `path` of all members
    `a.tar`: at byte 0: no member follows the header, end is at 1024
    `a.tar`: at byte 0: an extended header of 1048577 bytes, must have at most 1048576
    `a.tar`: at byte 2048: there is more after the end of the archive at byte 1024: is it two in one?
    ");
}

#[test]
fn zeros_may_follow_the_end_but_not_without_bound() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tar");
    std::fs::write(&path, [member("a.jpg", b'0', b"abc"), END.to_vec()].concat()).unwrap();
    let walk = |path: &Path| {
        let location = Location::Local(path.to_owned());
        let mut tar = Tar::open(&location, &Stores::default()).unwrap();
        tar.next().unwrap();
        tar.next().map(|end| end.is_none()).map_err(|error| error.to_string())
    };
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(10 << 20).unwrap();
    assert_eq!(walk(&path), Ok(true));
    file.set_len(1 << 40).unwrap();
    assert!(walk(&path).unwrap_err().contains("at most 16777216 may pad it"));
}
