use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::*;

fn headers(key: Option<&str>) -> HeaderMap {
    key.map(|key| (axum::http::HeaderName::from_static("idempotency-key"), key.parse().unwrap())).into_iter().collect()
}

async fn ask(remembered: &Remembered, key: Option<&str>, owner: &str, request: &str, done: &Arc<AtomicUsize>) -> Result<Value, ApiError> {
    let done = Arc::clone(done);
    let work = async move { Ok(Answer::created(done.fetch_add(1, Ordering::Relaxed))) };
    let answer = remembered.once(&headers(key), Some(owner.to_owned()), request, Waiting::default(), work).await?;
    Ok(serde_json::from_slice(&answer.body).unwrap())
}

/// One whose answer has so many bytes.
async fn ask_much(remembered: &Remembered, key: &str, owner: &str, bytes: usize) -> Result<usize, &'static str> {
    let work = async move { Ok(Answer::created("x".repeat(bytes - 2))) };
    let answer = remembered.once(&headers(Some(key)), Some(owner.to_owned()), "r", Waiting::default(), work).await;
    answer.map(|answer| answer.body.len()).map_err(|error| error.code)
}

#[tokio::test(start_paused = true)]
async fn the_same_request_is_done_once_for_its_key_within_ten_minutes() {
    let (remembered, done) = (Remembered::default(), Arc::new(AtomicUsize::new(0)));
    let (one, two) = tokio::join!(ask(&remembered, Some("k"), "a", "r", &done), ask(&remembered, Some("k"), "a", "r", &done));
    assert_eq!((one.unwrap(), two.unwrap()), (json!(0), json!(0)));
    assert_eq!(ask(&remembered, Some("k"), "a", "other", &done).await.unwrap_err().code, "idempotency_key_reused");
    assert_eq!(ask(&remembered, Some("k"), "b", "r", &done).await.unwrap(), json!(1), "another owner's key is another key");
    assert_eq!(ask(&remembered, None, "a", "r", &done).await.unwrap(), json!(2));
    tokio::time::advance(REMEMBER).await;
    assert_eq!(ask(&remembered, Some("k"), "a", "r", &done).await.unwrap(), json!(3));
    assert!(ask(&remembered, Some(&"k".repeat(256)), "a", "r", &done).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn what_takes_longer_than_it_is_remembered_is_not_done_twice() {
    let (remembered, done) = (Remembered::default(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&done);
    let slow = async move {
        tokio::time::sleep(REMEMBER * 3).await;
        Ok(Answer::created(count.fetch_add(1, Ordering::Relaxed)))
    };
    let (key, owner) = (headers(Some("k")), Some("a".to_owned()));
    // Its client goes away in the middle.
    let begun = tokio::time::timeout(REMEMBER * 2, remembered.once(&key, owner, "r", Waiting::default(), slow)).await;
    assert!(begun.is_err());
    assert_eq!(ask(&remembered, Some("k"), "a", "r", &done).await.unwrap(), json!(0), "who asks again waits for it");
    assert_eq!(done.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn answers_take_no_more_room_than_they_may_and_nothing_is_done_twice_for_that() {
    let remembered = Remembered::default();
    let large = MAX_OWNER_BYTES / 2;
    for key in ["one", "two", "three"] {
        assert_eq!(ask_much(&remembered, key, "a", large).await, Ok(large), "who waits for it gets it");
    }
    assert_eq!(ask_much(&remembered, "one", "a", 9).await, Err("answer_not_held"));
    for key in ["two", "three"] {
        assert_eq!(ask_much(&remembered, key, "a", 9).await, Ok(large), "{key} is the answer of the first request");
    }
    assert_eq!(ask_much(&remembered, "huge", "b", MAX_OWNER_BYTES + 1).await, Ok(MAX_OWNER_BYTES + 1));
    assert_eq!(ask_much(&remembered, "huge", "b", 9).await, Err("answer_not_held"));
    assert_eq!(ask_much(&remembered, "small", "c", 9).await, Ok(9));
    for owner in 0..10 {
        for key in ["one", "two"] {
            ask_much(&remembered, key, &format!("hungry {owner}"), large).await.unwrap();
        }
        let held = remembered.lock().owners.values().map(|own| own.bytes).sum::<usize>();
        assert!(held <= MAX_BYTES, "{held} bytes are held");
    }
    assert_eq!(ask_much(&remembered, "small", "c", 99).await, Ok(9), "who holds little keeps it");
    tokio::time::advance(REMEMBER).await;
    assert_eq!(ask_much(&remembered, "one", "a", 9).await, Ok(9));
    let all = remembered.lock();
    assert_eq!((all.owners.len(), all.owners[&Some("a".to_owned())].bytes), (1, 9), "what is old is gone, whoever asks next");
}

#[tokio::test(start_paused = true)]
async fn a_key_that_asks_for_too_much_is_refused_alone() {
    let (remembered, done) = (Remembered::default(), Arc::new(AtomicUsize::new(0)));
    for key in 0..MAX_REMEMBERED {
        ask(&remembered, Some(&key.to_string()), "a", "r", &done).await.unwrap();
    }
    assert_eq!(ask(&remembered, Some("more"), "a", "r", &done).await.unwrap_err().code, "rate_limited");
    ask(&remembered, Some("more"), "b", "r", &done).await.unwrap();
    assert_eq!(ask(&remembered, Some("7"), "a", "r", &done).await.unwrap(), json!(7), "what is remembered is");
}

#[tokio::test(start_paused = true)]
async fn it_is_known_whether_somebody_waits() {
    let remembered = Remembered::default();
    let waiting = Waiting::default();
    let mut seen = waiting.watched();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let work = async move {
        ended.await.unwrap();
        Ok(Answer::created("done"))
    };
    let (key, owner) = (headers(Some("k")), Some("a".to_owned()));
    {
        let first = remembered.once(&key, owner.clone(), "r", waiting.clone(), work);
        tokio::pin!(first);
        assert!(futures_util::poll!(&mut first).is_pending());
        assert_eq!(*seen.borrow_and_update(), 1);
    }
    assert_eq!(*seen.borrow_and_update(), 0, "who asked has gone");
    let again = remembered.once(&key, owner, "r", Waiting::default(), async { Ok(Answer::created("again")) });
    tokio::pin!(again);
    assert!(futures_util::poll!(&mut again).is_pending());
    assert_eq!(*seen.borrow_and_update(), 1, "who asks again waits for the same work");
    end.send(()).unwrap();
    assert_eq!(again.await.unwrap().body, &b"\"done\""[..]);
    assert_eq!(*seen.borrow_and_update(), 0);
}
