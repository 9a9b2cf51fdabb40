//! Where a volume is: a directory that all instances see, or a bucket that they speak to.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    bucket::{Bucket, BucketUrl},
    failpoint::FailPoints,
    local::LocalStore,
    record::{BucketRecords, Codec, DirectoryRecords, RecordStore},
    volume::Volume,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Directory(PathBuf),
    Bucket(BucketUrl),
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(formatter),
            Self::Bucket(url) => url.fmt(formatter),
        }
    }
}

impl Place {
    /// What somebody wrote down: a URL, or a directory that exists.
    ///
    /// # Errors
    /// It is neither, or a mounted bucket whose URL can't be told.
    pub fn at(text: &Path) -> Result<Self, String> {
        if let Some(url) = text.to_str().filter(|text| text.contains("://")) {
            return url.parse().map(Self::Bucket);
        }
        let path = text.canonicalize().map_err(|error| format!("{}: {error}", text.display()))?;
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        // A mounted bucket has no atomic operations.
        Ok(mounted_bucket(&table, &path)?.map_or(Self::Directory(path), Self::Bucket))
    }

    /// The directory, where it is one.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(path) => Some(path),
            Self::Bucket(_) => None,
        }
    }

    /// # Errors
    /// It is no directory, or what the environment says of the bucket makes no sense. Nothing is asked of a bucket yet.
    pub fn volume(&self, points: FailPoints) -> io::Result<Volume> {
        match self {
            Self::Directory(path) => Ok(Volume::in_directory(LocalStore::open(path, points)?)),
            Self::Bucket(url) => Ok(Volume::on(Bucket::open(url)?.data).asking_again()),
        }
    }

    /// # Errors
    /// As [`Place::volume`].
    pub fn records(&self, codec: Codec, points: FailPoints) -> io::Result<Arc<dyn RecordStore>> {
        match self {
            Self::Directory(path) => Ok(Arc::new(DirectoryRecords::open(path, codec, points)?)),
            Self::Bucket(url) => {
                let Bucket { reading, writing, .. } = Bucket::open(url)?;
                Ok(Arc::new(BucketRecords::new(reading, writing, codec)))
            }
        }
    }

    /// Tries that a bucket is there, can be written, and keeps to the conditions of a write: all that the leases rest on. A directory needs no such trial.
    ///
    /// # Errors
    /// It does not, with what to do about it.
    pub async fn check(&self) -> Result<(), String> {
        let Self::Bucket(url) = self else { return Ok(()) };
        let bucket = Bucket::open(url).map_err(|error| format!("{url}: {error}"))?;
        bucket.keeps_conditions().await.map_err(|fault| format!("{url}: {fault}"))
    }
}

/// The bucket below a path, by the mount table.
fn mounted_bucket(table: &str, path: &Path) -> Result<Option<BucketUrl>, String> {
    let mut nearest: Option<(PathBuf, String, &str, String)> = None;
    for line in table.lines() {
        let Some((before, after)) = line.split_once(" - ") else { continue };
        let (mut before, mut after) = (before.split(' '), after.split(' '));
        let (Some(root), Some(point)) = (before.nth(3), before.next()) else { continue };
        let (Some(kind), Some(source)) = (after.next(), after.next()) else { continue };
        let point = PathBuf::from(unescaped(point));
        // The last of those that are mounted over each other is the one that is seen.
        if path.starts_with(&point) && nearest.as_ref().is_none_or(|(known, ..)| point.starts_with(known)) {
            nearest = Some((point, unescaped(root), kind, unescaped(source)));
        }
    }
    let Some((point, root, kind, source)) = nearest else { return Ok(None) };
    let below = path.strip_prefix(&point).map(|below| below.to_string_lossy().into_owned()).unwrap_or_default();
    let prefix = [root.trim_matches('/'), below.as_str()].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
    // Mountpoint says who it is in place of what it shows.
    let kind = if kind == "fuse" { source.as_str() } else { kind.strip_prefix("fuse.").unwrap_or(kind) };
    match kind {
        "gcsfuse" => format!("gs://{source}/{prefix}").parse().map(Some),
        "s3fs" | "mountpoint-s3" | "goofys" | "geesefs" | "rclone" | "gcsfs" => Err(format!(
            "{} is a bucket mounted by {kind}, which has no atomic operations; use its URL instead: s3://BUCKET/{prefix} or gs://BUCKET/{prefix}",
            path.display()
        )),
        _ => Ok(None),
    }
}

/// The table writes spaces and the like as octal numbers.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
40 22 0:40 / /gcs rw,nosuid - fuse.gcsfuse my-bucket rw,user_id=0
41 22 0:41 / /mnt/s3\\040data rw - fuse.s3fs s3fs rw
42 22 0:42 / /mnt/mountpoint rw - fuse mountpoint-s3 rw
43 40 254:0 / /gcs/local rw - ext4 /dev/other rw
";

    fn bucket(path: &str) -> Result<Option<String>, String> {
        mounted_bucket(TABLE, Path::new(path)).map(|url| url.map(|url| url.to_string()))
    }

    #[test]
    fn a_mounted_bucket_is_used_by_its_url_or_refused() {
        assert_eq!(bucket("/gcs/states"), Ok(Some("gs://my-bucket/states".to_owned())));
        assert_eq!(bucket("/gcs"), Ok(Some("gs://my-bucket".to_owned())));
        assert_eq!(bucket("/gcsx"), Ok(None));
        assert_eq!(bucket("/gcs/local/x"), Ok(None));
        assert_eq!(bucket("/var/lib"), Ok(None));
        let refused = bucket("/mnt/s3 data/a/b").unwrap_err();
        assert!(refused.contains("s3://BUCKET/a/b"), "{refused}");
        assert!(bucket("/mnt/mountpoint").is_err());
    }

    #[test]
    fn a_place_is_a_directory_or_a_bucket_that_is_known() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Place::at(dir.path()), Ok(Place::Directory(dir.path().canonicalize().unwrap())));
        assert!(Place::at(&dir.path().join("missing")).is_err());
        assert_eq!(Place::at(Path::new("s3://bucket/a/b/")).unwrap().to_string(), "s3://bucket/a/b");
        for bad in ["http://bucket/x", "s3://", "s3:///x", "s3://UPPER", "s3://b/../c", "gs://b?x", "s3://a b/x", "s3://bucket//x"] {
            assert!(Place::at(Path::new(bad)).is_err(), "{bad}");
        }
    }
}
