//! A network that is far away.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
    time::Instant,
};

/// A proxy that hands every byte on after a fixed time, in both directions.
#[derive(Debug)]
pub struct DelayProxy {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl DelayProxy {
    pub async fn start(target: SocketAddr, one_way: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(target).await else { return };
                    let _ = (client.set_nodelay(true), server.set_nodelay(true));
                    let (client_in, client_out) = client.into_split();
                    let (server_in, server_out) = server.into_split();
                    tokio::spawn(carry(client_in, server_out, one_way));
                    carry(server_in, client_out, one_way).await;
                });
            }
        });
        Self { address, task }
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for DelayProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(mut from: impl AsyncRead + Unpin + Send + 'static, mut to: impl AsyncWrite + Unpin, delay: Duration) {
    let (sender, mut receiver) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            if sender.send((Instant::now() + delay, buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    });
    while let Some((due, bytes)) = receiver.recv().await {
        tokio::time::sleep_until(due).await;
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
