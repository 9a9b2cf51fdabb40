//! Filesystem snapshots that are damaged, and a volume that is away.

use super::*;

const LIST: &str = "/v1/filesystem-snapshots";

/// Makes one of an archive without entries.
async fn import(server: &Running, name: &str, replace: bool) -> u16 {
    let archive = [0; 1024];
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let request = format!(
        "PUT {LIST}/{name}/layer?replace={replace} HTTP/1.1\r\nHost: {}\r\nX-API-Key: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        server.address,
        secret(ALICE),
        archive.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.write_all(&archive).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Changes a byte in the middle of its manifest.
fn damage(ground: &Ground, name: &str) {
    let tenants = std::fs::read_dir(ground.0.path().join("volume/filesystem")).unwrap();
    let files = tenants.map(|tenant| tenant.unwrap().path().join(format!("{name}.img")));
    let file = files.into_iter().find(|file| file.exists()).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    std::fs::write(&file, bytes).unwrap();
}

async fn create_from(server: &Running, name: &str) -> (u16, Value) {
    ask(server.address, ALICE, "POST", "/v1/sandboxes", json!({"filesystem_snapshot_name": name})).await
}

#[tokio::test]
async fn a_damaged_filesystem_snapshot_is_listed_and_replaced() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    assert_eq!((import(&a, "good", false).await, import(&a, "bad", false).await), (201, 201));
    damage(&ground, "bad");
    let bad = format!("{LIST}/bad");
    let (status, list) = a.ask(ALICE, "GET", LIST).await;
    let mut items = list["items"].as_array().unwrap().clone();
    items.sort_by_key(|item| item["name"].to_string());
    assert_eq!((status, items.len()), (200, 2), "{list}");
    assert_eq!((&items[0]["name"], &items[1]["error"]), (&json!("bad"), &Value::Null), "{list}");
    let (status, told) = a.ask(ALICE, "GET", &bad).await;
    let why = told["error"].as_str().unwrap();
    assert!(status == 200 && why.contains("damaged") && !why.contains("checkpoint"), "{told}");
    assert_eq!(items[0], told);
    let (status, refused) = create_from(&a, "bad").await;
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("filesystem_snapshot_failed")), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("replace it"), "{refused}");

    assert_eq!(import(&a, "bad", false).await, 409, "its name is taken");
    assert_eq!(import(&a, "bad", true).await, 201);
    assert_eq!(a.ask(ALICE, "GET", &bad).await.1["error"], Value::Null);
    damage(&ground, "bad");
    assert_eq!(a.ask(ALICE, "DELETE", &bad).await.0, 204);
    assert_eq!(a.ask(ALICE, "GET", &bad).await.0, 404);
}

#[tokio::test]
async fn a_volume_that_is_away_is_told_as_such() {
    let ground = Ground::new();
    let a = ground.serve("a").await;
    assert_eq!(import(&a, "good", false).await, 201);
    let (volume, away) = (ground.0.path().join("volume"), ground.0.path().join("away"));
    std::fs::rename(&volume, &away).unwrap();
    // As after an unmount: the directory is there, and is another one.
    for empty in [false, true] {
        if empty {
            std::fs::create_dir(&volume).unwrap();
        }
        let unavailable = (503, json!("volume_unavailable"));
        for path in [LIST.to_owned(), format!("{LIST}/good")] {
            let (status, told) = a.ask(ALICE, "GET", &path).await;
            assert_eq!((status, told["error"]["code"].clone()), unavailable, "{path}, {empty}: {told}");
        }
        let (status, told) = create_from(&a, "good").await;
        assert_eq!((status, told["error"]["code"].clone()), unavailable, "{empty}: {told}");
        if !empty {
            let (status, told) = ask(a.address, ALICE, "POST", "/v1/sandboxes", json!({"enable_checkpoint": true})).await;
            assert_eq!((status, told["error"]["code"].clone()), unavailable, "{told}");
        }
    }
    std::fs::remove_dir(&volume).unwrap();
    std::fs::rename(&away, &volume).unwrap();
    assert_eq!(a.ask(ALICE, "GET", &format!("{LIST}/good")).await.0, 200);
}
