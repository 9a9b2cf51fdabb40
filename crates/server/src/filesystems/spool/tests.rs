use std::{fs, io::Read as _, time::Duration};

use flate2::{Compression, read::GzEncoder};

use super::*;
use crate::shares::Shares;

const LIMITS: Limits = Limits { bytes: 8 << 30, content: 8 << 30, entries: 100 };

/// A tar archive with one file of zeros.
fn archive(bytes: usize) -> Vec<u8> {
    let mut header = [0; 512];
    header[..4].copy_from_slice(b"file");
    header[100..107].copy_from_slice(b"0000644");
    header[108..115].copy_from_slice(b"0000000");
    header[116..123].copy_from_slice(b"0000000");
    header[124..135].copy_from_slice(format!("{bytes:011o}").as_bytes());
    header[136..147].copy_from_slice(b"00000000000");
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    let mut archive = header.to_vec();
    archive.resize(512 + bytes.next_multiple_of(512) + 1024, 0);
    archive
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    GzEncoder::new(plain, Compression::best()).read_to_end(&mut packed).unwrap();
    packed
}

struct Desk {
    dir: tempfile::TempDir,
    threads: Threads,
    disk: Shares,
}

impl Desk {
    fn with_disk(bytes: u64) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), threads: Threads::new("test", 1), disk: Shares::new(bytes) }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("layer")
    }

    async fn take(&self, data: &[u8], form: Form) -> Result<Spooled, NotTaken> {
        let (Pieces { sender, taken: _taken }, spool) = spool();
        let feeding = async {
            for piece in data.chunks(100_000) {
                if sender.send(Piece::Data(Bytes::copy_from_slice(piece))).await.is_err() {
                    return;
                }
            }
            drop(sender.send(Piece::End).await);
        };
        let disk = self.disk.take(Some("a"), 0).unwrap();
        tokio::join!(spool.write(self.path(), form, LIMITS, &self.threads, disk), feeding).0
    }
}

#[tokio::test]
async fn archives_come_plain_or_compressed() {
    let plain = archive(3_000_000);
    let zstd = zstd::encode_all(&plain[..], 3).unwrap();
    for (data, form) in [(plain.clone(), Form::Plain), (plain.clone(), Form::Any), (gzip(&plain), Form::Any), (zstd, Form::Any)] {
        let desk = Desk::with_disk(64 << 20);
        let spooled = desk.take(&data, form).await.map_err(|why| format!("{why:?}")).unwrap();
        assert_eq!((spooled.summary.entries, spooled.summary.content), (1, 3_000_000));
        assert_eq!(fs::read(desk.path()).unwrap(), plain);
        assert!(desk.disk.take(Some("a"), 64 << 20).is_none(), "its bytes count while it is there");
        drop(spooled);
        assert!(desk.disk.take(Some("a"), 64 << 20).is_some());
    }
}

#[tokio::test]
async fn archives_that_are_cut_off_are_not_taken() {
    let packed = gzip(&archive(3_000_000));
    let desk = Desk::with_disk(64 << 20);
    assert!(desk.take(&packed[..packed.len() - 20], Form::Any).await.is_err());
    let (Pieces { sender, taken: _taken }, spool) = spool();
    sender.send(Piece::Data(Bytes::from(packed))).await.map_err(drop).unwrap();
    drop(sender);
    let disk = desk.disk.take(None, 0).unwrap();
    let taken = spool.write(desk.dir.path().join("other"), Form::Any, LIMITS, &desk.threads, disk).await;
    assert!(matches!(taken, Err(NotTaken::Failed(why)) if why == "it was cut off"));
}

#[tokio::test]
async fn a_bomb_writes_no_more_than_its_key_may() {
    let bomb = gzip(&archive(200 << 20));
    assert!(bomb.len() < 1 << 20);
    let desk = Desk::with_disk(32 << 20);
    assert!(matches!(desk.take(&bomb, Form::Any).await, Err(NotTaken::Busy)));
    assert!(fs::metadata(desk.path()).unwrap().len() <= 32 << 20);
    assert!(desk.disk.take(Some("a"), 32 << 20).is_some(), "what it had is given back");
}

#[tokio::test]
async fn an_archive_that_unpacks_to_too_much_is_refused() {
    let bomb = gzip(&archive(300 << 20));
    let desk = Desk::with_disk(1 << 30);
    let refused = desk.take(&bomb, Form::Any).await;
    assert!(matches!(refused, Err(NotTaken::Refused(why)) if why.contains("200 times")));
}

#[tokio::test]
async fn senders_that_fall_silent_hold_no_thread() {
    let desk = Desk::with_disk(64 << 20);
    let mut silent = Vec::new();
    for number in 0..20 {
        let (pieces, spool) = spool();
        pieces.sender.send(Piece::Data(Bytes::from_static(b"a"))).await.map_err(drop).unwrap();
        let (path, threads, disk) = (desk.dir.path().join(number.to_string()), desk.threads.clone(), desk.disk.take(None, 0).unwrap());
        let writing = tokio::spawn(async move { spool.write(path, Form::Any, LIMITS, &threads, disk).await.is_ok() });
        silent.push((pieces, writing));
    }
    let done = tokio::time::timeout(Duration::from_secs(60), desk.take(&archive(1000), Form::Any)).await;
    assert!(done.expect("one thread is enough for it").is_ok());
    assert!(silent.iter().all(|(_, writing)| !writing.is_finished()));
}
