//! One round measures everything once by every means, one after the other, so that whatever the machine does meanwhile is done to all.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, Result};

use crate::{
    Part,
    bare::Bare,
    client::Client,
    docker::Docker,
    machine,
    memory::{processes_under, pss_mib},
    package::Package,
    peer::Peer,
    programs::{self, Program},
    raw::{Raw, RawSandbox, ms_since},
    samples::{Column, Row, Samples},
    saves::Saves,
    server::{COME_TO_REST, Server, Waits},
    timing::Timing,
};

/// Where each round's values of a program go.
struct Rows {
    first: Option<Row>,
    done: Row,
}

const ECHO: Rows = Rows { first: Some(Row::EchoFirst), done: Row::EchoDone };
const PRINT: Rows = Rows { first: Some(Row::PrintFirst), done: Row::PrintDone };
const IMPORTS: Rows = Rows { first: Some(Row::ImportsFirst), done: Row::ImportsDone };

/// Short ones are run more often in a round.
const ECHOES: usize = 4;
const READY: usize = 3;
const PRINTS: usize = 2;
/// So many in a row, a third of them Python.
const BACK_TO_BACK: usize = 200;
/// What takes long is measured in every third round only.
const SELDOM: usize = 3;

const LARGE_WRITE: usize = 64 * 1024;
const SMALL_WRITE: usize = 4 * 1024;
/// How long sandboxes are left alone before their memory is counted: they give back what they don't need.
const REST: std::time::Duration = std::time::Duration::from_secs(3);

pub(crate) struct Bench {
    pub(crate) raw: Raw,
    pub(crate) raw_sandbox: RawSandbox,
    pub(crate) bare: Bare,
    pub(crate) server: Server,
    /// One that has sandboxes waiting; the other one has none.
    pub(crate) ready: Server,
    pub(crate) client: Client,
    /// One whose sandboxes have no interpreters that wait, and a sandbox of it.
    pub(crate) fresh: Server,
    pub(crate) fresh_client: Client,
    pub(crate) package: Peer<Package>,
    pub(crate) package_home: PathBuf,
    pub(crate) docker: Peer<Docker>,
    pub(crate) docker_home: PathBuf,
    pub(crate) samples: Samples,
    pub(crate) spins: Vec<f64>,
    pub(crate) stdout_mib: usize,
    pub(crate) parts: Vec<Part>,
    pub(crate) saves: Option<Saves>,
}

impl Bench {
    pub(crate) async fn round(&mut self, round: usize) -> Result<()> {
        self.spins.push(machine::spin());
        if self.parts.contains(&Part::Latency) {
            self.latencies(round).await?;
            self.spins.push(machine::spin());
        }
        if self.parts.contains(&Part::Stdout) && round.is_multiple_of(SELDOM) {
            self.throughput(round).await?;
        }
        if let Some(saves) = &self.saves {
            saves.round(&mut self.raw, &mut self.samples).await?;
            self.spins.push(machine::spin());
        }
        Ok(())
    }

    async fn latencies(&mut self, round: usize) -> Result<()> {
        for column in turned(round) {
            self.create(column).await.with_context(|| format!("create: {}", column.title()))?;
        }
        self.create_ready().await.context("create with one waiting")?;
        self.create_to_output(&programs::echo()).await.context("create to first output")?;
        for repeat in 0..ECHOES {
            self.program(round + repeat, &programs::echo(), &ECHO).await?;
        }
        for repeat in 0..PRINTS {
            self.program(round + repeat, &programs::print(), &PRINT).await?;
        }
        self.program(round, &programs::imports(), &IMPORTS).await?;
        for _ in 0..ECHOES {
            let timing = self.fresh_client.run(&programs::echo()).await.context("bash echo without spares")?;
            self.samples.add(Row::EchoFresh, Column::Server, timing.done_ms);
            if let Some(agent_ms) = timing.agent_ms {
                self.samples.add(Row::EchoAgent, Column::Server, agent_ms);
            }
        }
        self.back_to_back(round).await.context("back to back")?;
        Ok(())
    }

    /// With spares, which run dry, and without.
    async fn back_to_back(&mut self, round: usize) -> Result<()> {
        let programs = [programs::echo(), programs::echo(), programs::print()];
        for turn in 0..2 {
            let (row, client) = if (round + turn).is_multiple_of(2) {
                (Row::BackToBack, &mut self.client)
            } else {
                (Row::BackToBackFresh, &mut self.fresh_client)
            };
            // What the one before has set going is over, and interpreters wait.
            tokio::time::sleep(COME_TO_REST).await;
            let begun = Instant::now();
            for at in 0..BACK_TO_BACK {
                client.run(&programs[at % programs.len()]).await?;
            }
            self.samples.add(row, Column::Server, ms_since(begun));
        }
        Ok(())
    }

    async fn throughput(&mut self, round: usize) -> Result<()> {
        for (row, write) in [(Row::StdoutLarge, LARGE_WRITE), (Row::StdoutSmall, SMALL_WRITE)] {
            let program = programs::stdout(self.stdout_mib, write);
            for column in turned(round) {
                // Whoever was measured before has something to clear up, and pools are filled again.
                tokio::time::sleep(COME_TO_REST).await;
                if let Some(timing) = self.run(column, &program).await? {
                    self.samples.add(row, column, timing.megabytes_per_second());
                }
            }
        }
        Ok(())
    }

    async fn create(&mut self, column: Column) -> Result<()> {
        let ms = match column {
            Column::Raw => {
                let (sandbox, ms) = self.raw.create().await?;
                self.raw.remove(sandbox).await?;
                ms
            }
            // It is what the raw one waits for.
            Column::Fifo => return Ok(()),
            Column::Package => {
                let Some(ms) = self.package.ask(async |package| package.create().await).await else { return Ok(()) };
                ms
            }
            Column::Docker => {
                let Some(ms) = self.docker.ask(async |docker| docker.create().await).await else { return Ok(()) };
                ms
            }
            Column::Server => {
                let (client, ms) = Client::create(self.server.address).await?;
                client.kill().await?;
                ms
            }
        };
        self.samples.add(Row::Create, column, ms);
        Ok(())
    }

    async fn create_ready(&mut self) -> Result<()> {
        for _ in 0..READY {
            self.ready.one_waits(Waits::Sandbox).await?;
            let (client, ms) = Client::create(self.ready.address).await?;
            client.kill().await?;
            self.samples.add(Row::CreateReady, Column::Server, ms);
        }
        Ok(())
    }

    async fn create_to_output(&mut self, program: &Program) -> Result<()> {
        self.ready.one_waits(Waits::Sandbox).await?;
        let (client, ms) = Client::create_to_output(self.ready.address, program).await?;
        client.kill().await?;
        self.samples.add(Row::CreateToOutput, Column::Server, ms);
        if let Some(ms) = self.package.ask(async |package| package.create_to_output(program).await).await {
            self.samples.add(Row::CreateToOutput, Column::Package, ms);
        }
        if let Some(ms) = self.docker.ask(async |docker| docker.create_to_output(program).await).await {
            self.samples.add(Row::CreateToOutput, Column::Docker, ms);
        }
        Ok(())
    }

    async fn program(&mut self, turn: usize, program: &Program, rows: &Rows) -> Result<()> {
        for column in turned(turn) {
            if column == Column::Server {
                // Programs of users come further apart than ours.
                tokio::time::sleep(COME_TO_REST).await;
            }
            let Some(timing) = self.run(column, program).await? else { continue };
            self.samples.add(rows.done, column, timing.done_ms);
            if let (Some(row), Some(value)) = (rows.first, timing.first_ms) {
                self.samples.add(row, column, value);
            }
        }
        Ok(())
    }

    /// None: there is no such column.
    async fn run(&mut self, column: Column, program: &Program) -> Result<Option<Timing>> {
        let timing = match column {
            Column::Raw => self.raw.exec(&self.raw_sandbox, program).await,
            Column::Fifo => self.bare.run(program).await,
            Column::Server => self.client.run(program).await,
            Column::Package => return Ok(self.package.ask(async |package| package.exec(program).await).await),
            Column::Docker => return Ok(self.docker.ask(async |docker| docker.exec(program).await).await),
        };
        timing.map(Some).with_context(|| format!("{:?} by {}", program.code, column.title()))
    }

    /// Memory of idle sandboxes, `count` of each kind.
    pub(crate) async fn memory(&mut self, count: usize) -> Result<()> {
        let (of_sandboxes, of_server) = memory_of(&self.fresh, count).await.context("memory: this server, no spares")?;
        self.samples.add(Row::Memory, Column::Server, of_sandboxes);
        self.samples.add(Row::MemoryOfServer, Column::Server, of_server);
        let (with_spares, _) = memory_of(&self.server, count).await.context("memory: this server")?;
        self.samples.add(Row::MemoryOfSpares, Column::Server, with_spares - of_sandboxes);
        let before = self.raw_memory();
        let mut sandboxes = Vec::new();
        for _ in 0..count {
            sandboxes.push(self.raw.create().await?.0);
        }
        tokio::time::sleep(REST).await;
        self.samples.add(Row::Memory, Column::Raw, share(self.raw_memory() - before, count));
        for sandbox in sandboxes {
            self.raw.remove(sandbox).await?;
        }
        if let Some(grown) = self.package.ask(async |package| grown_by(&self.package_home, count, package.keep(count)).await).await {
            self.samples.add(Row::Memory, Column::Package, grown);
        }
        if let Some(grown) = self.docker.ask(async |docker| grown_by(&self.docker_home, count, docker.keep(count)).await).await {
            self.samples.add(Row::Memory, Column::Docker, grown);
        }
        Ok(())
    }

    fn raw_memory(&self) -> f64 {
        pss_mib(&processes_under(self.raw.home(), 0))
    }

    pub(crate) async fn end(self) -> Result<()> {
        self.client.kill().await?;
        self.fresh_client.kill().await?;
        self.bare.remove().await?;
        self.raw.remove(self.raw_sandbox).await?;
        self.server.end().await?;
        self.fresh.end().await?;
        self.ready.end().await?;
        if let Some(saves) = self.saves {
            saves.end().await?;
        }
        if let Some(docker) = self.docker.into_inner() {
            docker.end().await?;
        }
        match self.package.into_inner() {
            Some(package) => package.end().await,
            None => Ok(()),
        }
    }
}

/// What each of so many takes that are made by `keep`, under one directory.
async fn grown_by(home: &Path, count: usize, keep: impl Future<Output = Result<()>>) -> Result<f64> {
    let memory = || pss_mib(&processes_under(home, 0));
    let before = memory();
    keep.await?;
    tokio::time::sleep(REST).await;
    Ok(share(memory() - before, count))
}

/// Of each of so many idle sandboxes, and of the server for it.
async fn memory_of(server: &Server, count: usize) -> Result<(f64, f64)> {
    let of_sandboxes = || pss_mib(&processes_under(&server.data, server.pid()));
    let of_server = || pss_mib(&[server.pid()]);
    tokio::time::sleep(REST).await;
    let (sandboxes, alone) = (of_sandboxes(), of_server());
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(Client::create(server.address).await?.0);
    }
    tokio::time::sleep(REST).await;
    let values = (share(of_sandboxes() - sandboxes, count), share(of_server() - alone, count));
    for client in clients {
        client.kill().await?;
    }
    Ok(values)
}

/// The columns, another one first each time: what comes first in a round has the machine's caches as something else left them.
fn turned(round: usize) -> [Column; 5] {
    let mut columns = Column::ALL;
    columns.rotate_left(round % Column::ALL.len());
    columns
}

#[expect(clippy::cast_precision_loss, reason = "some sandboxes")]
fn share(total: f64, count: usize) -> f64 {
    total / count.max(1) as f64
}
