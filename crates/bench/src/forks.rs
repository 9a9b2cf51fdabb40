//! Eight copies at once of a sandbox with 100 MiB of live memory, against eight `runsc restore` at once of the same bytes.

use std::{fs, path::Path, time::Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use sandboxer_client::{Api, Connection};
use sandboxer_protocol::agent::Marker;
use serde_json::json;

use crate::{
    client::Client,
    raw::{Raw, ms_since},
    samples::{Column, Row, Samples},
    server::{Server, Waits},
};

pub(crate) const AT_ONCE: usize = 8;

/// From the request for all of them to the answer, which names them when each agent has answered and each is safe on the volume.
pub(crate) async fn measure(server: &Server, client: &mut Client, raw: &mut Raw, work: &Path, samples: &mut Samples) -> Result<()> {
    let id = client.sandbox_id.clone();
    let (image, marker): (_, Marker) = (server.image_of(&id)?, server.marker_of(&id)?);
    let files = work.join("raw-fork");
    raw.checkpoint(server.runsc_state(), &server.container_of(&id)?, &files).await.context("raw checkpoint")?;
    let (sandboxes, restores) = raw.restore_many(&image, &marker, &files, AT_ONCE).await.context("raw restores at once")?;
    for sandbox in sandboxes {
        raw.remove(sandbox).await?;
    }
    fs::remove_dir_all(&files)?;
    samples.add(Row::Forks, Column::Raw, restores);

    let snapshot = client.snapshot().await.context("snapshot")?;
    server.one_waits(Waits::Container).await?;
    let api = Api::new(&format!("http://{}", server.address), &Connection::default())?;
    let begun = Instant::now();
    let made = api.request("POST", &format!("/v1/snapshots/{snapshot}/restore"), Some(&json!({ "count": AT_ONCE }))).await?;
    samples.add(Row::Forks, Column::Server, ms_since(begun));
    let made = made.ok().map_err(anyhow::Error::msg)?;
    let ids: Vec<&str> = made["items"].as_array().into_iter().flatten().filter_map(|item| item["id"].as_str()).collect();
    ensure!(ids.len() == AT_ONCE, "these were made: {ids:?}");
    try_join_all(ids.iter().map(|id| Client::end(server.address, id))).await.context("the end of the forks")?;
    api.request("DELETE", &format!("/v1/snapshots/{snapshot}"), None).await?.ok().map_err(anyhow::Error::msg)?;
    Ok(())
}
