//! What every store of records promises, on a real S3 server.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use object_store::{
    ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, S3ConditionalPut},
    prefix::PrefixStore,
};
use sandboxer_e2e::Bucket;
use sandboxer_store::record::{BucketRecords, Codec, RecordStore, conformance::Subject};

/// Each test has its own.
struct S3(Bucket);

impl S3 {
    fn store(&self, max_retries: usize) -> Arc<dyn ObjectStore> {
        let builder = AmazonS3Builder::new().with_bucket_name(Bucket::NAME).with_endpoint(self.0.endpoint()).with_allow_http(true);
        let builder = builder.with_access_key_id("test").with_secret_access_key("test").with_region("us-east-1");
        let builder =
            builder.with_conditional_put(S3ConditionalPut::ETagMatch).with_retry(RetryConfig { max_retries, ..RetryConfig::default() });
        Arc::new(PrefixStore::new(builder.build().unwrap(), "records"))
    }
}

impl Subject for S3 {
    fn view(&self) -> Arc<dyn RecordStore> {
        Arc::new(BucketRecords::new(self.store(10), self.store(0), Codec::default()))
    }
}

async fn start() -> S3 {
    // An error means that there is one already.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    S3(Bucket::start().await)
}

sandboxer_store::record_conformance_tests!(start().await);
