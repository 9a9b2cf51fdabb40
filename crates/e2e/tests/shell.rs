//! `sandboxer shell` on a real terminal.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    process::Command,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use sandboxer_e2e::{Cli, DEADLINE, Gate, Options, Terminal, Volume, eventually, free_address, sha256, shared};

const PROMPT: &str = "inside$ ";

/// A shell whose prompt is known.
async fn shell(cli: &Cli, arguments: &[&str]) -> Terminal {
    let command = cli.command(["shell"].iter().chain(arguments));
    let mut terminal = Terminal::start(&command, 24, 200);
    // What is typed before the shell is there is not lost.
    terminal.type_in("bind 'set enable-bracketed-paste off'; PS1='inside''$ '\r");
    terminal.until(PROMPT).await;
    terminal
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_has_the_terminal_its_size_its_signals_and_its_jobs() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    let mut terminal = shell(&cli, &[&id[..13]]).await;
    assert!(!terminal.is_cooked());
    terminal.type_in("tty; stty size; echo $TERM\r");
    terminal.until("/dev/pts/").await;
    terminal.until("24 200\r\n").await;
    terminal.until("xterm-256color\r\n").await;
    terminal.until(PROMPT).await;
    terminal.resize(50, 132);
    terminal.type_in("until stty size | grep 50.132; do sleep 0.1; done\r");
    terminal.until("50 132\r\n").await;
    terminal.until(PROMPT).await;
    // Ctrl-C ends the program in the foreground, and not the shell. The program itself says that it is there: before that, the key may find the shell
    // in the foreground still, which then waits for its program as every shell does.
    terminal.type_in("bash -c 'echo begin''s; exec sleep 1000'\r");
    terminal.until("begins\r\n").await;
    terminal.type_in("\x03");
    terminal.until(PROMPT).await;
    terminal.type_in("echo code $?\r");
    terminal.until("code 130\r\n").await;
    // Ctrl-Z stops it, fg has it go on where it was.
    terminal.type_in("bash -c 'echo wai''ts; read line; echo got $line'\r");
    terminal.until("waits\r\n").await;
    terminal.type_in("\x1a");
    terminal.until("Stopped").await;
    terminal.until(PROMPT).await;
    terminal.type_in("jobs; fg\r");
    terminal.until("Stopped").await;
    terminal.type_in("a line\r");
    terminal.until("got a line\r\n").await;
    terminal.until(PROMPT).await;
    terminal.type_in("exit 42\r");
    assert_eq!(terminal.exited().await.code(), Some(42));
    assert!(terminal.is_cooked(), "the terminal is as it was");
    assert!(cli.ok(["ls"]).contains(&id), "the sandbox stays");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paste_of_a_mebibyte_arrives_byte_by_byte() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    let mut terminal = shell(&cli, &[&id]).await;
    // Every byte but those that a terminal's own line editing would keep, and what looks like the way out among them.
    let mut paste: Vec<u8> =
        (0..1_048_576_u32).map(|n| b"abcdefghijklmnopqrstuvwxyz~.\r\n\x04\x03\x1a\xff\x80 "[(n * 7 + n / 41) as usize % 36]).collect();
    paste.extend_from_slice(b"\r~.\r");
    let digest = sha256(&paste);
    let program = format!(
        "python3 -c 'import hashlib, os, sys, tty; tty.setraw(0); print(\"rea\" + \"dy\", end=\"\", flush=True); left = {}; digest = hashlib.sha256()\n\
         while left:\n    piece = os.read(0, 65536); digest.update(piece); left -= len(piece)\nprint(digest.hexdigest())'; stty sane\r",
        paste.len()
    );
    terminal.type_in(program);
    terminal.until("ready").await;
    terminal.type_in(&paste);
    terminal.until(&digest).await;
    terminal.type_in("exit\r");
    assert_eq!(terminal.exited().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_id_a_sandbox_is_made_and_removed_and_the_terminal_is_restored_whatever_ends_it() {
    let server = Options::default().start();
    let cli = Cli::new(&server);
    let mut terminal = shell(&cli, &["-e", "WORD=thrown away"]).await;
    terminal.type_in("echo $WORD\r");
    terminal.until("thrown away\r\n").await;
    assert_eq!(cli.ok(["ls"]).lines().count(), 2);
    terminal.type_in("\x04");
    assert_eq!(terminal.exited().await.code(), Some(0));
    assert!(terminal.is_cooked());
    assert_eq!(cli.ok(["ls"]), "");
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129), (Signal::SIGINT, 130)] {
        let mut terminal = shell(&cli, &[]).await;
        assert!(!terminal.is_cooked());
        terminal.signal(signal);
        assert_eq!(terminal.exited().await.code(), Some(code));
        assert!(terminal.is_cooked(), "{signal}");
    }
    assert_eq!(cli.ok(["ls"]), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_that_is_left_goes_on_and_is_come_back_to() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    let mut terminal = shell(&cli, &[&id]).await;
    terminal.type_in("word=kept\r");
    terminal.until(PROMPT).await;
    // By hand: one key after the other.
    terminal.type_in("\r");
    terminal.until(PROMPT).await;
    terminal.type_in("~");
    // Held back until the next one comes, so nothing is shown that could be waited for.
    terminal.until_taken().await;
    terminal.type_in(".");
    assert_eq!(terminal.exited().await.code(), Some(0));
    terminal.until("sandboxer attach").await;
    assert!(terminal.is_cooked());
    let mut terminal = Terminal::start(&cli.command(["attach", &id[..13]]), 30, 100);
    terminal.type_in("echo $word; until stty size | grep 30.100; do sleep 0.1; done\r");
    terminal.until("kept\r\n").await;
    terminal.until("30 100\r\n").await;
    terminal.type_in("exit 5\r");
    assert_eq!(terminal.exited().await.code(), Some(5));
    assert!(terminal.is_cooked());
}

/// Writes numbered lines, each once, as long as it runs.
const COUNTING: &str = "i=0; while [ ! -e stop ]; do echo \"line $((i++)) end\"; sleep 0.02; done; echo all $i\r";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_goes_on_through_every_restart_of_the_server_with_every_byte() {
    let volume = Volume::default();
    let mut a = volume.options().listen(Some(&free_address())).start();
    // However slow the disk is: what does not fit into the time is another promise.
    let mut b = volume.options().listen(Some(&free_address())).arg("--stop-grace").arg("60").start();
    let way = Gate::start(a.address()).await;
    let cli = Cli::at(&[way.address(), b.address()]);
    let id = cli.create(&["--checkpoint"]);
    let mut terminal = shell(&cli, &[&id]).await;
    terminal.type_in(COUNTING);
    terminal.until("done; echo all $i\r\n").await;
    let mut shown = String::new();
    let mut more = async |terminal: &mut Terminal| {
        for _ in 0..30 {
            shown += &terminal.until(" end\r\n").await;
        }
    };
    more(&mut terminal).await;
    a.usr2();
    a.restart();
    more(&mut terminal).await;
    a.kill9();
    a.restart();
    more(&mut terminal).await;
    // Lines alone don't tell where it is: they may have been shown before.
    way.cut();
    eventually("it was handed to the other one", DEADLINE, || b.view_of(&id).is_some()).await;
    more(&mut terminal).await;
    way.mend();
    b.term();
    b.exited().await;
    eventually("the first has it again", DEADLINE, || a.view_of(&id).is_some()).await;
    more(&mut terminal).await;
    // It ends by itself: keys would be shown among its lines.
    cli.ok(["cp", "-", &format!("{id}:/root/stop")]);
    shown += &terminal.until("all ").await;
    let count: usize = terminal.until("\r\n").await.trim().parse().unwrap();
    let lines: Vec<String> = (0..count).map(|number| format!("line {number} end\r\n")).collect();
    assert_eq!(shown.strip_suffix("all ").unwrap(), lines.concat());
    terminal.until(PROMPT).await;
    terminal.type_in("exit 3\r");
    assert_eq!(terminal.exited().await.code(), Some(3));
}

/// A terminal of its own server, by tmux.
struct Tmux {
    socket: String,
}

impl Tmux {
    fn start(command: &Command) -> Self {
        let tmux = Self { socket: format!("sbx-{}-{:?}", std::process::id(), std::thread::current().id()).replace(['(', ')'], "") };
        let mut start = tmux.command(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "--"]);
        start.arg("env");
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                start.arg(format!("{}={}", name.to_str().unwrap(), value.to_str().unwrap()));
            }
        }
        start.arg(command.get_program()).args(command.get_args());
        assert!(start.status().unwrap().success());
        tmux
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        command.args(["-L", &self.socket]).args(arguments).env_remove("TMUX");
        command
    }

    fn does(&self, arguments: &[&str]) {
        assert!(self.command(arguments).status().unwrap().success(), "{arguments:?}");
    }

    /// Rows and columns.
    fn size(&self) -> (usize, usize) {
        let told = self.command(&["display-message", "-p", "#{pane_height} #{pane_width}"]).output().unwrap().stdout;
        let told = String::from_utf8(told).unwrap();
        let (rows, cols) = told.trim().split_once(' ').unwrap();
        (rows.parse().unwrap(), cols.parse().unwrap())
    }

    fn screen(&self) -> String {
        String::from_utf8(self.command(&["capture-pane", "-p"]).output().unwrap().stdout).unwrap()
    }

    async fn until(&self, what: &str, condition: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if condition(&screen) {
                return screen;
            }
            assert!(start.elapsed() < DEADLINE, "not so: {what}\n{screen}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        let _ = self.command(&["kill-server"]).status();
    }
}

/// Draws a frame with its size in the middle, and says which key was pressed.
const FULL_SCREEN: &str = "
import curses
def main(screen):
    key = 'none'
    while key != 'q':
        rows, cols = screen.getmaxyx()
        screen.erase(); screen.border('|', '|', '-', '-', '+', '+', '+', '+')
        screen.addstr(rows // 2, 5, f'size {rows} {cols} key {key}')
        screen.refresh()
        key = screen.getkey()
curses.wrapper(main)
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_screen_program_draws_follows_the_size_takes_keys_and_leaves_the_screen_as_it_was() {
    let cli = Cli::new(shared());
    let id = cli.create(&[]);
    assert!(
        cli.command(["exec", &id, "--", "tee", "/root/full.py"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .is_ok_and(|mut child| {
                std::io::Write::write_all(&mut child.stdin.take().unwrap(), FULL_SCREEN.as_bytes()).unwrap();
                child.wait().unwrap().success()
            })
    );
    let tmux = Tmux::start(&cli.command(["shell", &id]));
    tmux.until("the shell is there", |screen| screen.trim_end().ends_with(['$', '#'])).await;
    tmux.does(&["send-keys", "-l", "echo before; python3 full.py"]);
    tmux.does(&["send-keys", "Enter"]);
    let (rows, cols) = tmux.size();
    let screen = tmux.until("it is drawn", |screen| screen.contains(&format!("size {rows} {cols} key none"))).await;
    let lines: Vec<&str> = screen.lines().collect();
    let edge = format!("+{}+", "-".repeat(cols - 2));
    assert!(
        lines.len() == rows && lines[0] == edge && lines[rows / 2].starts_with("|    size") && lines[rows - 1].starts_with("+---"),
        "{screen}"
    );
    tmux.does(&["send-keys", "Up"]);
    tmux.until("an arrow key is one key", |screen| screen.contains("key KEY_UP")).await;
    tmux.does(&["resize-window", "-x", "100", "-y", "40"]);
    let screen = tmux.until("it is drawn anew", |screen| screen.contains("size 40 100")).await;
    assert_eq!(screen.lines().next().unwrap().len(), 100, "{screen}");
    tmux.does(&["send-keys", "q"]);
    let back = |screen: &str| {
        screen.contains("echo before; python3 full.py") && !screen.contains("+---") && screen.trim_end().ends_with(['$', '#'])
    };
    tmux.until("the screen is as it was", back).await;
    tmux.does(&["send-keys", "-l", "exit"]);
    tmux.does(&["send-keys", "Enter"]);
    eventually("its terminal is closed", DEADLINE, || !tmux.command(&["has-session"]).status().unwrap().success()).await;
}
