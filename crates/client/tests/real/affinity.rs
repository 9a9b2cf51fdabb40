//! Behind a load balancer that routes by cookie, the client comes back to the server that has its sandbox.

use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use sandboxer_client::{Options, Sandbox};
use sandboxer_e2e::{CutProxy, Fault, count, seed, shared};

use super::{DEADLINE, quick};

/// Routes by the cookie `route`, and where there is none to one server after the other. `always`, since 101 is skipped otherwise.
const CONFIG: &str = "
daemon off;
worker_processes 1;
pid DIR/pid;
error_log DIR/error.log;
events {}
http {
    access_log off;
    client_body_temp_path DIR/body;
    proxy_temp_path DIR/proxy;
    fastcgi_temp_path DIR/fastcgi;
    uwsgi_temp_path DIR/uwsgi;
    scgi_temp_path DIR/scgi;
    upstream any { server FIRST; server SECOND; }
    map $cookie_route $target { first FIRST; second SECOND; default any; }
    map $upstream_addr $route { FIRST first; SECOND second; }
    server {
        listen LISTEN;
        location / {
            proxy_pass http://$target;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection upgrade;
            proxy_set_header Host 127.0.0.1;
            proxy_read_timeout 1h;
            add_header Set-Cookie \"route=$route; Path=/; HttpOnly\" always;
        }
    }
}
";

struct Nginx {
    child: Child,
    address: SocketAddr,
    directory: tempfile::TempDir,
}

impl Nginx {
    fn start(first: SocketAddr, second: SocketAddr) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = CONFIG
            .replace("DIR", directory.path().to_str().unwrap())
            .replace("FIRST", &first.to_string())
            .replace("SECOND", &second.to_string())
            .replace("LISTEN", &address.to_string());
        let path = directory.path().join("nginx.conf");
        std::fs::write(&path, config).unwrap();
        let mut command = Command::new("nginx");
        command.arg("-p").arg(directory.path()).arg("-c").arg(&path).stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => panic!("there is no nginx: run scripts/setup --dev"),
            child => child.unwrap(),
        };
        let start = Instant::now();
        while TcpStream::connect(address).is_err() {
            let log = std::fs::read_to_string(directory.path().join("error.log")).unwrap_or_default();
            assert!(start.elapsed() < DEADLINE, "nginx does not start: {log}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { child, address, directory }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Its workers end with it.
        let _ = Command::new("nginx")
            .arg("-p")
            .arg(self.directory.path())
            .arg("-c")
            .arg(self.directory.path().join("nginx.conf"))
            .args(["-s", "stop"])
            .status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn after_a_drop_the_client_lands_where_it_was() {
    let other = sandboxer_e2e::Options::default().start();
    let nginx = Nginx::start(shared().address(), other.address());
    let proxy = CutProxy::start(nginx.address, seed(), 2_000..9_000, &[Fault::Cut]).await;
    let url = format!("http://{}", proxy.address());
    let drops = count(8, 100);
    let mut sandboxes = Vec::new();
    for number in 0..4 {
        let sandbox = Sandbox::create(&url, Options::default().connection(quick())).await.unwrap();
        sandbox.bash(format!("echo {number} > /root/who")).await.unwrap().output().await.unwrap();
        sandboxes.push(sandbox);
    }
    // Neither server has them all, and neither knows the other's: whoever lands on the wrong one is told that there is no such
    // sandbox.
    while proxy.happened() < drops {
        for (number, sandbox) in sandboxes.iter().enumerate() {
            let output = sandbox.bash("cat /root/who; head -c 3000 /dev/zero | tr '\\0' x").await.unwrap().output().await.unwrap();
            assert_eq!(output.stdout, format!("{number}\n{}", "x".repeat(3000)).into_bytes());
        }
    }
    assert!(nginx_used_both(&other), "all sandboxes are on one server");
    proxy.heal();
    for sandbox in sandboxes {
        sandbox.kill_sandbox().await.unwrap();
    }
}

fn nginx_used_both(other: &sandboxer_e2e::Server) -> bool {
    !other.sandbox_processes().is_empty() && !shared().sandbox_processes().is_empty()
}
