//! Several servers share one volume: a sandbox goes where its client is, and its program does not notice.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::{Duration, Instant};

use sandboxer_e2e::{Talk, Volume, Ws, count, eventually};
use serde_json::json;

#[tokio::test]
async fn a_client_that_goes_from_instance_to_instance_misses_and_repeats_nothing() {
    let volume = Volume::default();
    let servers = [volume.serve(), volume.serve(), volume.serve()];
    let mut ws = Ws::create_kept(&servers[0]).await;
    let id = ws.sandbox_id.clone();
    let mut talk = Talk::begin(&mut ws).await;
    let bounces = count(15, 200);
    let mut took = Vec::new();
    for bounce in 1..=bounces {
        talk.go_on(&mut ws, 100).await;
        // Every other time without a word.
        if bounce % 2 == 0 {
            ws.vanish()
        } else {
            ws.close().await
        }
        let begun = Instant::now();
        let (next, running) = Ws::reach(&servers[bounce % servers.len()], &id).await;
        took.push(begun.elapsed());
        assert!(running.get("rewound").is_none(), "{running}");
        ws = next;
        talk.resume(&mut ws).await;
    }
    talk.finish(&mut ws).await;
    took.sort();
    let at = |percent: usize| took[(took.len() - 1) * percent / 100].as_millis();
    println!(
        "{bounces} handoffs of a running program, each from the attach to SANDBOX_RUNNING: median {} ms, 90 % {} ms, longest {} ms",
        at(50),
        at(90),
        at(100)
    );
}

#[tokio::test]
async fn an_attached_client_keeps_its_sandbox_unless_it_was_made_to_give_way() {
    let volume = Volume::default();
    let (a, b) = (volume.serve(), volume.serve());
    let mut kept = Ws::create_kept(&a).await;
    let mut ws = Ws::open(&b, &format!("/attach/{}", kept.sandbox_id)).await;
    let refused = async {
        ws.expect_status("SANDBOX_RESTORING").await;
        ws.expect_status("SANDBOX_IN_USE").await;
        ws.expect_close(1011).await;
    };
    tokio::select! {
        // It is attached while it answers.
        told = kept.incoming() => panic!("{told:?}"),
        () = refused => {}
    }
    kept.expect_alive().await;

    let mut giving = Ws::create_with(&a, json!({"enable_checkpoint": true, "enable_sandbox_handoff": true})).await;
    let _ = giving.bash("echo kept > f").await.ok();
    let id = giving.sandbox_id.clone();
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    giving.expect_status("SANDBOX_LOCK_RELEASE_REQUESTED").await;
    giving.expect_status("SANDBOX_CHECKPOINTING").await;
    giving.expect_status("SANDBOX_CHECKPOINTED").await;
    giving.expect_close(1000).await;
    ws.expect_status("SANDBOX_RUNNING").await;
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn a_server_that_was_killed_takes_up_what_it_holds_and_gives_it_on() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_kept(&a).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo kept > f").await.ok();
    a.kill9();
    a.restart();
    let (mut ws, running) = Ws::reach(&a, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
    ws.close().await;
    let (mut ws, running) = Ws::reach(&b, &id).await;
    assert!(running.get("rewound").is_none(), "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "kept\n");
}

#[tokio::test]
async fn what_an_instance_left_that_died_comes_back_from_its_last_save_and_says_so() {
    let volume = Volume::default();
    let (mut a, b) = (volume.serve(), volume.serve());
    let mut ws = Ws::create_kept(&a).await;
    let id = ws.sandbox_id.clone();
    let _ = ws.bash("echo saved > f").await.ok();
    ws.close().await;
    eventually("the disconnect is saved", sandboxer_e2e::DEADLINE, || volume.record(&id)["latest"].is_string()).await;
    let mut ws = Ws::attach(&a, &id).await;
    let _ = ws.bash("echo lost > f").await.ok();
    a.burn_down();
    let mut ws = Ws::open(&b, &format!("/attach/{id}")).await;
    ws.expect_status("SANDBOX_RESTORING").await;
    let running = match ws.incoming_within(Duration::from_secs(60)).await {
        Some(sandboxer_e2e::Incoming::Message(message)) => message,
        other => panic!("{other:?}"),
    };
    assert_eq!((&running["status"], &running["rewound"]), (&json!("SANDBOX_RUNNING"), &json!(true)), "{running}");
    assert_eq!(running["generation"], 2, "{running}");
    assert_eq!(ws.bash("cat f").await.ok(), "saved\n");
    ws.close().await;
    // Who missed that knows it by the generation.
    let (_, running) = Ws::reach(&b, &id).await;
    assert_eq!(running["generation"], 2, "{running}");

    // The old instance comes back, and has nothing to say in it.
    a.restart();
    let (mut ws, _) = Ws::reach(&a, &id).await;
    assert_eq!(ws.bash("cat f").await.ok(), "saved\n");
}
