//! The bytes of a record: bounded, versioned, and sealed where the volume has a key.

use std::sync::Arc;

use sandboxer_protocol::SandboxId;
use serde_json::Value;

use super::{MAX_COUNT, MAX_REASON_BYTES, MAX_RECORD_BYTES, RECORD_FORMAT, Record, Verdict};

/// A keyed hash under the volume's key.
pub type MacFn = Arc<dyn Fn(&[u8]) -> [u8; 32] + Send + Sync>;

const MAC_FIELD: &str = "mac";

/// Why bytes are no record. Whoever reads one never changes or deletes it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    #[error("the record has more than {MAX_RECORD_BYTES} bytes")]
    TooLarge,
    #[error("the record is not what it should be: {0}")]
    Malformed(String),
    #[error("the record has format {0}, written by a newer version; this one knows {RECORD_FORMAT}")]
    Newer(u32),
    #[error("the record is not sealed with this volume's key")]
    NotAuthentic,
}

/// Writes and reads records. With a key, what it does not seal it does not read.
///
/// The seal (`"mac"`, 64 hexadecimal digits) covers the sandbox's id and every other field, so that neither can be put in another's
/// place. It can't tell an old version from the newest: who can write to the volume can set it back.
#[derive(Clone, Default)]
pub struct Codec {
    mac: Option<MacFn>,
}

impl std::fmt::Debug for Codec {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Codec").field("sealed", &self.mac.is_some()).finish()
    }
}

impl Codec {
    #[must_use]
    pub fn sealed(mac: MacFn) -> Self {
        Self { mac: Some(mac) }
    }

    /// # Errors
    /// The record is larger than may be read again.
    pub fn encode(&self, id: SandboxId, record: &Record) -> Result<Vec<u8>, BadRecord> {
        let malformed = |error: serde_json::Error| BadRecord::Malformed(error.to_string());
        let mut value = serde_json::to_value(record).map_err(malformed)?;
        if let Some(mac) = &self.mac {
            let seal = hex(&mac(&sealed_bytes(id, &value)));
            if let Some(fields) = value.as_object_mut() {
                fields.insert(MAC_FIELD.to_owned(), Value::String(seal));
            }
        }
        let mut bytes = serde_json::to_vec(&value).map_err(malformed)?;
        bytes.push(b'\n');
        if bytes.len() > MAX_RECORD_BYTES {
            return Err(BadRecord::TooLarge);
        }
        Ok(bytes)
    }

    /// # Errors
    /// [`BadRecord`], for whatever a volume may hold.
    pub fn decode(&self, id: SandboxId, bytes: &[u8]) -> Result<Record, BadRecord> {
        if bytes.len() > MAX_RECORD_BYTES {
            return Err(BadRecord::TooLarge);
        }
        let malformed = |error: serde_json::Error| BadRecord::Malformed(error.to_string());
        let mut value: Value = serde_json::from_slice(bytes).map_err(malformed)?;
        let fields = value.as_object_mut().ok_or_else(|| BadRecord::Malformed("no object".to_owned()))?;
        let seal = fields.remove(MAC_FIELD);
        if let Some(mac) = &self.mac {
            let expected = hex(&mac(&sealed_bytes(id, &value)));
            let seal = seal.as_ref().and_then(Value::as_str).unwrap_or_default();
            if !same(seal.as_bytes(), expected.as_bytes()) {
                return Err(BadRecord::NotAuthentic);
            }
        }
        if let Some(format) = value.get("format").and_then(Value::as_u64).filter(|format| *format > u64::from(RECORD_FORMAT)) {
            return Err(BadRecord::Newer(u32::try_from(format).unwrap_or(u32::MAX)));
        }
        let record: Record = serde_json::from_value(value).map_err(malformed)?;
        check(&record)?;
        Ok(record)
    }
}

fn check(record: &Record) -> Result<(), BadRecord> {
    let counters = [record.epoch, record.sequence, record.renewed];
    if counters.iter().any(|count| *count > MAX_COUNT) || record.sequence == 0 || record.epoch == 0 || record.renewed > record.sequence {
        return Err(BadRecord::Malformed("a counter is out of its range".to_owned()));
    }
    let reasons = [
        record.tombstone.as_ref().map(|tombstone| tombstone.reason.len()),
        record.answer.as_ref().map(|answer| match &answer.verdict {
            Verdict::InUse => 0,
            Verdict::CannotSave { reason } => reason.len(),
        }),
    ];
    if reasons.into_iter().flatten().any(|length| length > MAX_REASON_BYTES) {
        return Err(BadRecord::Malformed("a reason is too long".to_owned()));
    }
    Ok(())
}

/// What the seal covers: the id and the fields in one order, whatever order they were written in.
fn sealed_bytes(id: SandboxId, value: &Value) -> Vec<u8> {
    let mut bytes = format!("sandboxer record {id}\n").into_bytes();
    canonical(value, &mut bytes);
    bytes
}

fn canonical(value: &Value, into: &mut Vec<u8>) {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            into.push(b'{');
            for (name, value) in fields {
                canonical(&Value::String(name.clone()), into);
                into.push(b':');
                canonical(value, into);
                into.push(b',');
            }
            into.push(b'}');
        }
        Value::Array(items) => {
            into.push(b'[');
            for item in items {
                canonical(item, into);
                into.push(b',');
            }
            into.push(b']');
        }
        plain => into.extend_from_slice(plain.to_string().as_bytes()),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compares without telling by its time where two seals differ.
fn same(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::record::{Nonce, Stamp};

    fn record() -> Record {
        Record::first("one".parse().unwrap(), Stamp { unix: 1_800_000_000, nonce: Nonce::from_bits(7) }, Default::default())
    }

    fn keyed(key: u8) -> Codec {
        Codec::sealed(Arc::new(move |bytes| *blake3::keyed_hash(&[key; 32], bytes).as_bytes()))
    }

    #[test]
    fn a_record_reads_as_the_contract_says() {
        let bytes = Codec::default().encode(SandboxId::random(), &record()).unwrap();
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        let expected = json!({"format": 1, "owner": "one", "timestamp": 1_800_000_000, "epoch": 1, "sequence": 1, "renewed": 1,
            "nonce": "00000000000000000000000000000007", "latest": null, "resting": false, "waiter": null, "answer": null,
            "tombstone": null});
        assert_eq!(value, expected);
    }

    #[test]
    fn fields_of_a_newer_version_are_kept() {
        let id = SandboxId::random();
        let mut value = serde_json::to_value(record()).unwrap();
        value["weather"] = json!({"sky": [1, 2.5, null]});
        value["waiter"] =
            json!({"instance": "b", "nonce": "0000000000000000000000000000000a", "renewed": 1, "timestamp": 1, "mood": "good"});
        let read = Codec::default().decode(id, value.to_string().as_bytes()).unwrap();
        let holder = read.holder().unwrap();
        let next = read.by_owner(&holder, &[], Stamp { unix: 1, nonce: Nonce::from_bits(9) }).unwrap();
        let written: Value = serde_json::from_slice(&Codec::default().encode(id, &next).unwrap()).unwrap();
        assert_eq!(written["weather"], value["weather"]);
        assert_eq!(written["waiter"]["mood"], "good");
    }

    #[test]
    fn a_seal_binds_the_id_and_every_field() {
        let (id, codec) = (SandboxId::random(), keyed(1));
        let bytes = codec.encode(id, &record()).unwrap();
        assert_eq!(codec.decode(id, &bytes), Ok(record()));
        assert_eq!(codec.decode(SandboxId::random(), &bytes), Err(BadRecord::NotAuthentic));
        assert_eq!(keyed(2).decode(id, &bytes), Err(BadRecord::NotAuthentic));
        let unsealed = Codec::default().encode(id, &record()).unwrap();
        assert_eq!(codec.decode(id, &unsealed), Err(BadRecord::NotAuthentic));
        assert_eq!(Codec::default().decode(id, &bytes), Ok(record()), "without a key a seal is ignored");
        let forged = String::from_utf8(bytes).unwrap().replace("\"epoch\":1", "\"epoch\":2");
        assert_eq!(codec.decode(id, forged.as_bytes()), Err(BadRecord::NotAuthentic));
    }

    #[test]
    fn what_is_no_record_says_why() {
        let id = SandboxId::random();
        let codec = Codec::default();
        let mut newer = serde_json::to_value(record()).unwrap();
        newer["format"] = json!(2);
        assert_eq!(codec.decode(id, newer.to_string().as_bytes()), Err(BadRecord::Newer(2)));
        assert_eq!(codec.decode(id, &[b' '; MAX_RECORD_BYTES + 1]), Err(BadRecord::TooLarge));
        for (field, bad) in [
            ("sequence", json!(0)),
            ("epoch", json!(u64::MAX)),
            ("renewed", json!(2)),
            ("owner", json!("a b")),
            ("latest", json!("../x")),
            ("nonce", json!("7")),
            ("answer", json!({"to": "0000000000000000000000000000000a", "verdict": "cannot_save", "reason": "x".repeat(2000)})),
        ] {
            let mut value = serde_json::to_value(record()).unwrap();
            value[field] = bad;
            assert!(matches!(codec.decode(id, value.to_string().as_bytes()), Err(BadRecord::Malformed(_))), "{field}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Codec::default().decode(SandboxId::random(), &bytes);
            let _ = keyed(1).decode(SandboxId::random(), &bytes);
        }
    }
}
