//! A bucket, spoken to by its own API with conditional writes. Endpoint and credentials come from the environment variables that everybody's tools use.

mod attested;

use std::{fmt, io, str::FromStr, sync::Arc, time::Duration};

use object_store::{
    BackoffConfig, ClientConfigKey, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    path::Path,
    prefix::PrefixStore,
};

pub(crate) use self::attested::{Attested, Evidence};
use crate::{layout, record::Nonce};

/// What one request for data may take. A pack has 12 MiB: four at once need 14 Mbit/s.
const DATA_REQUEST: Duration = Duration::from_secs(30);
/// How long data is asked for again and again.
pub(crate) const DATA_PATIENCE: Duration = Duration::from_secs(120);
/// What one request for a record may take: its lease is running out meanwhile.
const RECORD_REQUEST: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(5);
/// What the marker says to people.
const MARKER: &str = "Sandboxes are kept here. By this object servers tell their bucket from one that is not there: leave it.\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    S3,
    Gs,
}

/// `s3://bucket/prefix` or `gs://bucket/prefix`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketUrl {
    scheme: Scheme,
    bucket: String,
    prefix: String,
}

impl FromStr for BucketUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = |what: &str| format!("{text}: {what}; a bucket is named s3://BUCKET/PREFIX or gs://BUCKET/PREFIX");
        let (scheme, rest) = text.split_once("://").ok_or_else(|| fault("it is no URL"))?;
        let scheme = match scheme {
            "s3" => Scheme::S3,
            "gs" => Scheme::Gs,
            _ => return Err(fault("nothing is known of this kind of store")),
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let named = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'_');
        if !(1..=222).contains(&bucket.len()) || !bucket.bytes().all(named) {
            return Err(fault("that is no bucket's name"));
        }
        let prefix = prefix.trim_end_matches('/');
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b'=' | b'+' | b'@');
        let good = |part: &str| !matches!(part, "" | "." | "..") && part.bytes().all(plain);
        if !prefix.is_empty() && !prefix.split('/').all(good) {
            return Err(fault("a prefix has letters, digits and . - _ = + @ between single slashes"));
        }
        Ok(Self { scheme, bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::S3 => "s3",
            Scheme::Gs => "gs",
        };
        write!(formatter, "{scheme}://{}", self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(formatter, "/{}", self.prefix) }
    }
}

/// The same place three times, since what may be asked again and for how long is not the same for all of it.
pub(crate) struct Bucket {
    /// Asked again for long.
    pub(crate) data: Arc<dyn ObjectStore>,
    /// For records: asked again for as long as a lease can wait.
    pub(crate) reading: Arc<dyn ObjectStore>,
    /// For records: asked once, since only who asks knows what a lost answer means.
    pub(crate) writing: Arc<dyn ObjectStore>,
}

impl Bucket {
    pub(crate) fn open(url: &BucketUrl) -> io::Result<Self> {
        // An error means that there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let open = |request: Duration, patience: Duration| store(url, request, patience).map_err(io::Error::other);
        Ok(Self {
            data: Arc::new(Attested::new(open(DATA_REQUEST, DATA_PATIENCE)?, Evidence::Answer, DATA_PATIENCE)),
            reading: open(RECORD_REQUEST, RECORD_REQUEST)?,
            writing: open(RECORD_REQUEST, Duration::ZERO)?,
        })
    }

    /// Puts the marker there, by which the bucket is known from now on.
    pub(crate) async fn mark(&self) -> Result<(), String> {
        let marked = self.data.put(&layout::marker(), MARKER.into()).await;
        marked.map(drop).map_err(|error| error.to_string())
    }

    /// Tries it with an object of its own.
    pub(crate) async fn keeps_conditions(&self) -> Result<(), String> {
        const IGNORED: &str = "this store ignores the conditions of a write, so that two instances could run one sandbox; it can't be used";
        let path = layout::probes().join(Nonce::random().to_string());
        let put = |content: &'static str, mode| self.data.put_opts(&path, content.into(), PutOptions::from(mode));
        let said = |error: object_store::Error| error.to_string();
        let tried = async {
            let first = put("1", PutMode::Create).await.map_err(said)?;
            match put("2", PutMode::Create).await {
                Err(object_store::Error::AlreadyExists { .. }) => {}
                Ok(_) => return Err(IGNORED.to_owned()),
                Err(error) => return Err(said(error)),
            }
            put("3", PutMode::Update(first.clone().into())).await.map_err(said)?;
            match put("4", PutMode::Update(first.into())).await {
                Err(object_store::Error::Precondition { .. }) => {}
                Ok(_) => return Err(IGNORED.to_owned()),
                Err(error) => return Err(said(error)),
            }
            Ok(())
        };
        let tried = tried.await;
        let _ = self.data.delete(&path).await;
        tried
    }
}

fn store(url: &BucketUrl, request: Duration, patience: Duration) -> object_store::Result<Arc<dyn ObjectStore>> {
    // What the environment says of the client stays.
    let times = [(ClientConfigKey::Timeout, request), (ClientConfigKey::ConnectTimeout, CONNECT)];
    let times = times.map(|(key, time)| (key, format!("{} seconds", time.as_secs())));
    let backoff = BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: Duration::from_secs(5), base: 2.0 };
    let retry = RetryConfig { backoff, max_retries: if patience.is_zero() { 0 } else { usize::MAX }, retry_timeout: patience };
    let prefix = Path::from(url.prefix.as_str());
    Ok(match url.scheme {
        Scheme::S3 => {
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(&url.bucket).with_retry(retry);
            for (key, time) in times {
                builder = builder.with_config(AmazonS3ConfigKey::Client(key), time);
            }
            Arc::new(PrefixStore::new(builder.with_conditional_put(S3ConditionalPut::ETagMatch).build()?, prefix))
        }
        Scheme::Gs => {
            let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(&url.bucket).with_retry(retry);
            for (key, time) in times {
                builder = builder.with_config(GoogleConfigKey::Client(key), time);
            }
            Arc::new(PrefixStore::new(builder.build()?, prefix))
        }
    })
}
