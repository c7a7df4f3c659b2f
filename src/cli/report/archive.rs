//! The archive: its files, and a `README.txt` that lists the files and the parts that were left out.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use super::super::exit::{Exit, Failure};
use crate::limits::REPORT_FILE_BYTES_MAX;

/// The folder in the archive.
const FOLDER: &str = "kvrouted-report";
/// Permission bits of the archive and of the files in it.
const MODE: u32 = 0o600;

/// One file of the archive.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: String,
    /// A phrase that describes it.
    about: String,
    pub(super) bytes: Vec<u8>,
}

/// The files of an archive, and what was left out of it.
#[derive(Debug, Default)]
pub(super) struct Contents {
    parts: Vec<Part>,
    left_out: Vec<(String, String)>,
}

impl Contents {
    /// Adds a file. One that is too large is left out.
    pub(super) fn add(&mut self, name: &str, about: &str, bytes: impl Into<Vec<u8>>) {
        let bytes = bytes.into();
        if bytes.len() > REPORT_FILE_BYTES_MAX {
            let why =
                format!("it has {} bytes, and a file of the archive has at most {REPORT_FILE_BYTES_MAX}", bytes.len());
            return self.leave_out(name, why);
        }
        self.parts.push(Part { name: name.to_owned(), about: about.to_owned(), bytes });
    }

    /// Notes that a file, or a part of one, is left out.
    pub(super) fn leave_out(&mut self, name: &str, why: impl Into<String>) {
        self.left_out.push((name.to_owned(), why.into()));
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(super) fn left_out(&self) -> &[(String, String)] {
        &self.left_out
    }

    /// The `README.txt`: what each file is, and which parts were left out and why.
    fn readme(&self, now_unix_s: u64) -> String {
        let mut lines = vec![
            format!("A report of kvrouted {}, written {now_unix_s} s after 1970.", env!("CARGO_PKG_VERSION")),
            "It has no prompts, tokens of prompts or contents of secret files. Values that look like secrets, and user parts \
             of URLs, are masked."
                .to_owned(),
            String::new(),
            "Files".to_owned(),
        ];
        let line = |part: &Part| format!("  {} ({} bytes): {}", part.name, part.bytes.len(), part.about);
        lines.extend(self.parts.iter().map(line));
        lines.extend([String::new(), "Left out".to_owned()]);
        lines.extend(self.left_out.iter().map(|(name, why)| format!("  {name}: {why}")));
        if self.left_out.is_empty() {
            lines.push("  nothing".to_owned());
        }
        lines.push(String::new());
        lines.join("\n")
    }
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    let what = match error.kind() {
        io::ErrorKind::AlreadyExists => "exists, and is not overwritten; name another file with --output".to_owned(),
        _ => format!("cannot be written: {error}; name another file with --output"),
    };
    Failure::new(Exit::System, format!("{} {what}", path.display()))
}

/// Creates the file of an archive, for its owner only. Never replaces a file or follows a link.
///
/// # Errors
/// It exists, or cannot be created.
pub(super) fn create(path: &Path) -> Result<File, Failure> {
    let file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path);
    file.map_err(|error| unwritable(path, &error))
}

/// Writes the archive and returns its size in bytes. If the write fails, removes the file.
///
/// # Errors
/// It cannot be written.
pub(super) fn write(file: &File, path: &Path, contents: &Contents, now_unix_s: u64) -> Result<u64, Failure> {
    let written = pack(file, contents, now_unix_s).and_then(|()| file.sync_all()).and_then(|()| file.metadata());
    written.map(|metadata| metadata.len()).map_err(|error| {
        // A part of an archive would look like a whole one. If the removal fails too, the message still says so.
        let _ = std::fs::remove_file(path);
        unwritable(path, &error)
    })
}

fn pack(file: &File, contents: &Contents, now_unix_s: u64) -> io::Result<()> {
    let mut archive = Builder::new(GzEncoder::new(BufWriter::new(file), Compression::default()));
    let readme = contents.readme(now_unix_s);
    append(&mut archive, "README.txt", readme.as_bytes(), now_unix_s)?;
    for part in &contents.parts {
        append(&mut archive, &part.name, &part.bytes, now_unix_s)?;
    }
    archive.into_inner()?.finish()?.flush()
}

fn append(archive: &mut Builder<impl io::Write>, name: &str, bytes: &[u8], now_unix_s: u64) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(MODE);
    header.set_mtime(now_unix_s);
    header.set_size(bytes.len() as u64);
    archive.append_data(&mut header, format!("{FOLDER}/{name}"), bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn an_archive_is_its_owners_and_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tar.gz");
        let mut contents = Contents::default();
        contents.add("status.json", "its status.", "{}");
        contents.leave_out("journal", "there is none");
        let bytes = write(&create(&path).unwrap(), &path, &contents, 7).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.len()), (MODE, bytes));
        let refused = create(&path).unwrap_err();
        assert!(refused.exit == Exit::System && refused.message.contains("exists"), "{refused:?}");
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), folder.path().join("link")).unwrap();
        assert!(create(&folder.path().join("link")).is_err() && !folder.path().join("elsewhere").exists());
    }

    #[test]
    fn a_file_that_is_too_large_is_left_out_with_its_reason() {
        let mut contents = Contents::default();
        contents.add("metrics.txt", "its metrics.", vec![b'x'; REPORT_FILE_BYTES_MAX + 1]);
        assert!(contents.parts().is_empty());
        let page = contents.readme(0);
        assert!(page.contains("metrics.txt: it has 67108865 bytes"), "{page}");
    }
}
