//! `network log` and `port`: what a sandbox reaches, and how it is reached.

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::{Context as _, Result};
use clap::Subcommand;
use sandboxer_client::{Api, SandboxId};
use serde_json::{Value, json};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

use crate::ask::{Ask, table, text};

/// Connections that are forwarded at once.
const MAX_FORWARDED: usize = 256;

#[derive(Debug, clap::Args)]
pub(crate) struct NetworkArgs {
    #[command(flatten)]
    ask: Ask,
    #[command(subcommand)]
    command: NetworkCommand,
}

#[derive(Debug, Subcommand)]
enum NetworkCommand {
    /// List the newest connections of a sandbox's programs, also those that were refused, oldest first
    Log {
        /// The sandbox, or the beginning of its id
        #[arg(value_name = "SANDBOX_ID")]
        id: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct PortArgs {
    #[command(flatten)]
    ask: Ask,
    /// Listen here and pass every connection on to the port, as `ssh -L` does, rather than print a link
    #[arg(short = 'L', long, value_name = "[ADDRESS:]PORT", value_parser = local)]
    listen: Option<SocketAddr>,
    /// How long the link is good for
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    expires_in: u64,
    /// The sandbox, or the beginning of its id
    #[arg(value_name = "SANDBOX_ID")]
    id: String,
    /// The port of the sandbox's loopback address that a program in it listens at
    #[arg(value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

fn local(text: &str) -> Result<SocketAddr, String> {
    let full = if text.contains(':') { text.replacen("localhost:", "127.0.0.1:", 1) } else { format!("127.0.0.1:{text}") };
    full.parse().map_err(|_| "a port, or an address with one, such as 127.0.0.1:8000".to_owned())
}

pub(crate) fn network(args: &NetworkArgs) -> Result<ExitCode> {
    let NetworkCommand::Log { id } = &args.command;
    let log = args.ask.ask("GET", &format!("/v1/sandboxes/{}/network", args.ask.sandbox_id(id)?), None)?;
    let heads = ["TIME", "VIA", "HOST", "PORT", "ADDRESS", "VERDICT", "SENT", "RECEIVED", "MS", "WHY"];
    let fields = ["time", "via", "host", "port", "address", "verdict", "sent", "received", "duration_ms", "why"];
    args.ask.print(&log, |log| table(&heads, log, &fields))
}

pub(crate) fn port(args: &PortArgs) -> Result<ExitCode> {
    let id = args.ask.sandbox_id(&args.id)?;
    let Some(listen) = args.listen else {
        let body = json!({ "port": args.port, "expires_in": args.expires_in });
        let link = args.ask.ask("POST", &format!("/v1/sandboxes/{id}/ports"), Some(&body))?;
        return args.ask.print(&link, |link: &Value| format!("{}\n", text(link, "url")));
    };
    let id = args.ask.sandbox(&id)?;
    let api = args.ask.api()?;
    // That it is there is told before anybody connects.
    args.ask.ask("GET", &format!("/v1/sandboxes/{id}"), None)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(forward(api, id, args.port, listen))
}

/// Passes connections on until it is interrupted.
async fn forward(api: Api, id: SandboxId, port: u16, listen: SocketAddr) -> Result<ExitCode> {
    let listener = TcpListener::bind(listen).await.with_context(|| format!("listen on {listen}"))?;
    println!("listening on {}, which is port {port} of {id}", listener.local_addr()?);
    let places = Arc::new(Semaphore::new(MAX_FORWARDED));
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await?;
            let (connection, _) = listener.accept().await.context("take a connection")?;
            anyhow::Ok((place, connection))
        };
        let (place, connection) = tokio::select! {
            next = next => next?,
            interrupted = tokio::signal::ctrl_c() => return Ok(interrupted.map(|()| ExitCode::SUCCESS)?),
        };
        let api = api.clone();
        tokio::spawn(async move {
            if let Err(error) = pass_on(&api, id, port, connection).await {
                eprintln!("sandboxer: {error:#}");
            }
            drop(place);
        });
    }
}

async fn pass_on(api: &Api, id: SandboxId, port: u16, mut connection: TcpStream) -> Result<()> {
    connection.set_nodelay(true)?;
    let mut inside = api.connect_port(id, port).await?;
    // That either end breaks off is the end of both, and told to both by it.
    let _ = copy_bidirectional(&mut connection, &mut inside).await;
    Ok(())
}
