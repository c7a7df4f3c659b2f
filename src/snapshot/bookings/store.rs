//! Where images of bookings are: two memory files that the service manager keeps while no daemon runs, and a file beside
//! the snapshots.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use super::{BookingsImage, decode_bookings};
use crate::limits::{BOOKINGS_IMAGE_BYTES_MAX, SNAPSHOT_BUFFER_BYTES};
use crate::snapshot::directory::Directory;
use crate::snapshot::restore::open;
use crate::snapshot::stats::{Fault, Refusal};

/// Two memory files. One of them has the last whole image, while the other one is written.
#[derive(Debug)]
struct MemoryFiles {
    files: [File; 2],
    /// The one to write next.
    next: usize,
}

/// Where an image goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteTo {
    /// To the memory files, if there are some.
    Memory,
    /// To the directory too.
    Directory,
    /// To the directory too, until it has reached the disk.
    Disk,
}

/// The places of images.
#[derive(Debug, Default)]
pub struct BookingsStore {
    directory: Option<Arc<Directory>>,
    memory: Option<MemoryFiles>,
}

/// What a start found.
#[derive(Debug, Default)]
pub struct Found {
    /// The newest image that can be used.
    pub image: Option<BookingsImage>,
    /// The images that cannot be used.
    pub faults: Vec<Fault>,
}

impl Found {
    /// Takes what was read of a place, which `discard` empties. Whether it is the newest image so far.
    fn take(&mut self, read: Result<Option<BookingsImage>, Fault>, discard: impl FnOnce() -> io::Result<()>) -> bool {
        let number = |image: &Option<BookingsImage>| image.as_ref().map(|image| image.facts.number);
        match read {
            Ok(image) if number(&image) > number(&self.image) => {
                self.image = image;
                true
            }
            Ok(_) => false,
            Err(fault) => {
                self.faults.push(fault);
                if let Err(error) = discard() {
                    let remedy = "remove it by hand; a later start could use it";
                    tracing::warn!(%error, remedy, "an image of the bookings that is not used cannot be removed");
                }
                false
            }
        }
    }
}

impl BookingsStore {
    /// The places: a directory, and memory files that the service manager keeps.
    #[must_use]
    pub fn new(directory: Option<Arc<Directory>>, memory: Option<[File; 2]>) -> Self {
        Self { directory, memory: memory.map(|files| MemoryFiles { files, next: 0 }) }
    }

    /// Whether there is a place.
    #[must_use]
    pub const fn is_some(&self) -> bool {
        self.directory.is_some() || self.memory.is_some()
    }

    /// Whether a directory keeps images.
    #[must_use]
    pub const fn has_directory(&self) -> bool {
        self.directory.is_some()
    }

    /// Whether the service manager keeps images.
    #[must_use]
    pub const fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// Copies of the memory files, to pass them on.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn memory_files(&self) -> io::Result<Vec<File>> {
        let files = self.memory.iter().flat_map(|memory| &memory.files);
        files.map(File::try_clone).collect()
    }

    /// Reads all images to their ends. Those that cannot be used are removed, or renamed in the directory: a later run could
    /// use them, and their bookings have ended by then.
    pub fn read(&mut self) -> Found {
        let mut found = Found::default();
        // First, so that the better one of two is known.
        if let Some(memory) = &mut self.memory {
            for at in 0..memory.files.len() {
                let read = read_file(&mut memory.files[at]);
                if found.take(read, || memory.files[at].set_len(0)) {
                    memory.next = 1 - at;
                }
            }
        }
        if let Some(directory) = &self.directory {
            found.take(read_path(&directory.bookings_file()), || directory.set_bookings_aside());
        }
        found
    }

    /// Removes all images.
    ///
    /// # Errors
    /// The first that cannot be removed.
    pub fn clear(&self) -> io::Result<()> {
        if let Some(memory) = &self.memory {
            memory.files.iter().try_for_each(|file| file.set_len(0))?;
        }
        self.directory.as_ref().map_or(Ok(()), |directory| directory.remove_bookings())
    }

    /// Writes an image: to the memory files if there are some, and to the directory if there are none, or if `to` has it.
    /// `write` writes it to the end, and returns its bytes.
    ///
    /// # Errors
    /// The first of the file system. The image before is still there.
    pub(super) fn write(
        &mut self,
        to: WriteTo,
        mut write: impl FnMut(&mut dyn Write) -> io::Result<u64>,
    ) -> io::Result<u64> {
        let mut bytes = 0;
        if let Some(memory) = &mut self.memory {
            let mut file = &memory.files[memory.next];
            file.seek(SeekFrom::Start(0))?;
            let mut out = BufWriter::with_capacity(SNAPSHOT_BUFFER_BYTES, file);
            bytes = write(&mut out)?;
            out.flush()?;
            // What is left of a longer image before it.
            memory.files[memory.next].set_len(bytes)?;
            memory.next = 1 - memory.next;
        }
        if let Some(directory) = self.directory.as_ref().filter(|_| to != WriteTo::Memory || self.memory.is_none()) {
            bytes = directory.write_bookings(to == WriteTo::Disk, |file| {
                let mut out = BufWriter::with_capacity(SNAPSHOT_BUFFER_BYTES, file);
                let bytes = write(&mut out)?;
                out.flush().map(|()| bytes)
            })?;
        }
        Ok(bytes)
    }
}

fn read_path(path: &Path) -> Result<Option<BookingsImage>, Fault> {
    open(path)?.map_or(Ok(None), |mut file| read_file(&mut file))
}

/// The image in a file; `None` = the file is empty.
///
/// # Errors
/// Why it cannot be used.
pub fn read_file(file: &mut File) -> Result<Option<BookingsImage>, Fault> {
    // Reading anything else could wait.
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(Fault { refusal: Refusal::Unreadable, offset: 0 });
    }
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let read = file.take(BOOKINGS_IMAGE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    match read {
        0 => Ok(None),
        read if read > BOOKINGS_IMAGE_BYTES_MAX => {
            Err(Fault { refusal: Refusal::Malformed, offset: BOOKINGS_IMAGE_BYTES_MAX as u64 })
        }
        _ => decode_bookings(&bytes).map(Some),
    }
}

fn unreadable(_: io::Error) -> Fault {
    Fault { refusal: Refusal::Unreadable, offset: 0 }
}
