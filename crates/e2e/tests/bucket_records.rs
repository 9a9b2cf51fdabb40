//! What every store of records and every volume promises, on real object stores: two that speak S3, and Google's as a shim shows it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{path::Path, sync::Arc};

use object_store::{
    ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, S3ConditionalPut},
    gcp::GoogleCloudStorageBuilder,
    prefix::PrefixStore,
};
use sandboxer_e2e::{Bucket, Store};
use sandboxer_store::{
    Volume,
    record::{BucketRecords, Codec, RecordStore},
};

/// Each test has its own prefix.
struct Subject {
    bucket: Bucket,
    kind: Store,
    scratch: tempfile::TempDir,
}

impl Subject {
    async fn on(kind: Store) -> Self {
        // An error means that there is one already.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        Self { bucket: Bucket::start_on(kind).await, kind, scratch: tempfile::tempdir().unwrap() }
    }

    fn store(&self, max_retries: usize) -> Arc<dyn ObjectStore> {
        let (retry, prefix) = (RetryConfig { max_retries, ..RetryConfig::default() }, self.bucket.prefix());
        if self.kind == Store::Google {
            let builder = GoogleCloudStorageBuilder::new().with_bucket_name(Bucket::NAME).with_service_account_key(self.bucket.account());
            let options = object_store::ClientOptions::new().with_allow_http(true);
            return Arc::new(PrefixStore::new(builder.with_client_options(options).with_retry(retry).build().unwrap(), prefix));
        }
        let builder = AmazonS3Builder::new().with_bucket_name(Bucket::NAME).with_endpoint(self.bucket.endpoint()).with_allow_http(true);
        let builder = builder.with_access_key_id("test").with_secret_access_key("test").with_region("us-east-1");
        let builder = builder.with_conditional_put(S3ConditionalPut::ETagMatch).with_retry(retry);
        Arc::new(PrefixStore::new(builder.build().unwrap(), prefix))
    }
}

impl sandboxer_store::record::conformance::Subject for Subject {
    fn view(&self) -> Arc<dyn RecordStore> {
        Arc::new(BucketRecords::new(self.store(10), self.store(0), Codec::default(), "one".parse().ok()))
    }
}

impl sandboxer_store::conformance::Subject for Subject {
    fn volume(&self) -> Volume {
        Volume::on(self.store(10)).asking_again()
    }

    fn records(&self) -> Arc<dyn RecordStore> {
        sandboxer_store::record::conformance::Subject::view(self)
    }

    fn scratch(&self) -> &Path {
        self.scratch.path()
    }
}

macro_rules! conformance_tests {
    ($($name:ident: $kind:expr;)*) => {
        $(
            mod $name {
                use super::*;

                mod records {
                    use super::*;
                    sandboxer_store::record_conformance_tests!(Subject::on($kind).await);
                }

                mod volume {
                    use super::*;
                    sandboxer_store::volume_conformance_tests!(Subject::on($kind).await);
                }
            }
        )*
    };
}

conformance_tests! {
    moto: Store::Moto;
    seaweed: Store::Seaweed;
    google: Store::Google;
}
