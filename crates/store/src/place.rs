//! Where a volume is: a directory that all instances see, or a bucket that they speak to.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    bucket::{Bucket, BucketUrl, Evidence},
    failpoint::FailPoints,
    local::LocalStore,
    record::{BucketRecords, Codec, DirectoryRecords, InstanceId, RecordStore},
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

    /// `me` is told of those who wait for its sandboxes, and has checked the place ([`Place::check`]).
    ///
    /// # Errors
    /// As [`Place::volume`].
    pub fn records(&self, codec: Codec, points: FailPoints, me: Option<InstanceId>) -> io::Result<Arc<dyn RecordStore>> {
        match self {
            Self::Directory(path) => Ok(Arc::new(DirectoryRecords::open(path, codec, points)?)),
            Self::Bucket(url) => {
                let Bucket { reading, writing, .. } = Bucket::open(url)?;
                // An instance has put its marker there.
                let evidence = if me.is_some() { Evidence::Marker } else { Evidence::Answer };
                Ok(Arc::new(BucketRecords::new(reading, writing, codec, me).attested_by(evidence)))
            }
        }
    }

    /// Tries that a bucket is there, can be written, and keeps to the conditions of a write: all that the leases rest on. Marks it, so that it is known
    /// again. A directory needs no such trial.
    ///
    /// # Errors
    /// It does not, with what to do about it.
    pub async fn check(&self) -> Result<(), String> {
        let Self::Bucket(url) = self else { return Ok(()) };
        let bucket = Bucket::open(url).map_err(|error| format!("{url}: {error}"))?;
        let checked = async {
            bucket.keeps_conditions().await?;
            bucket.mark().await
        };
        checked.await.map_err(|fault| format!("{url}: {fault}"))
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
    let refused = |url: String| {
        let path = path.display();
        Err(format!("{path} is a bucket mounted by {kind}, which has no atomic operations; use its URL instead: {url}"))
    };
    let below = |bucket: &str| if prefix.is_empty() { bucket.to_owned() } else { format!("{bucket}/{prefix}") };
    match kind {
        // Mounted without a bucket's name it shows all that it may see, each as a directory.
        "gcsfuse" if source == "gcsfuse" => format!("gs://{prefix}").parse().map(Some),
        "gcsfuse" => format!("gs://{}", below(&source)).parse().map(Some),
        // `bucket` or `bucket:prefix`.
        "goofys" | "geesefs" if source != kind => format!("s3://{}", below(&source.replacen(':', "/", 1))).parse().map(Some),
        "s3fs" | "mountpoint-s3" | "goofys" | "geesefs" => refused(format!("s3://{}", below("BUCKET"))),
        // `remote:bucket/prefix`; of what kind the remote is only rclone knows.
        "rclone" => {
            let bucket = source.split_once(':').map_or("BUCKET", |(_, bucket)| bucket.trim_matches('/'));
            refused(format!("s3://{0} or gs://{0}", below(bucket)))
        }
        "gcsfs" => refused(format!("gs://{}", below("BUCKET"))),
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
44 22 0:44 / /all rw - fuse.gcsfuse gcsfuse rw
45 22 0:45 /sub /mnt/part rw - fuse.gcsfuse my-bucket rw
46 22 0:46 / /mnt/geese rw - fuse.geesefs my-bucket:some/where rw
47 22 0:47 / /mnt/rclone rw - fuse.rclone work:my-bucket/deep rw
48 22 0:48 / /mnt/ssh rw - fuse.sshfs me@there:/srv rw
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
        assert!(bucket("/mnt/mountpoint").unwrap_err().ends_with("s3://BUCKET"));
        assert_eq!(bucket("/all/a-bucket/x"), Ok(Some("gs://a-bucket/x".to_owned())));
        assert!(bucket("/all").is_err(), "it is no bucket");
        assert_eq!(bucket("/mnt/part/x"), Ok(Some("gs://my-bucket/sub/x".to_owned())));
        assert_eq!(bucket("/mnt/geese/x"), Ok(Some("s3://my-bucket/some/where/x".to_owned())));
        assert!(bucket("/mnt/rclone/x").unwrap_err().contains("s3://my-bucket/deep/x or gs://my-bucket/deep/x"));
        assert_eq!(bucket("/mnt/ssh"), Ok(None));
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
