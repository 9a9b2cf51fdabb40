use std::{thread, time::Duration};

use sandboxer_runtime::HostResources;

use super::*;

fn open(dir: &Path, max_bytes: u64) -> Templates {
    let facts = Facts { runsc_version: "one".to_owned(), ..Facts::default() };
    Templates::open(dir.join("templates"), TemplateSettings { max_bytes, facts }).unwrap()
}

fn launch() -> Launch {
    let config = serde_json::json!({"marker": "aa", "disk_bytes": 1, "disk_inodes": 2, "memory_bytes": 3, "pids": 4,
        "output_window_bytes": 5, "stdin_window_bytes": 6});
    let config = serde_json::from_value(config).unwrap();
    Launch { id: SandboxId::random(), dir: "/somewhere".into(), image: "/image".into(), config, resources: HostResources::default() }
}

fn key(templates: &Templates, snapshot: u8) -> Key {
    templates.key(&[snapshot; 32], &launch()).unwrap()
}

fn make(templates: &Templates, key: &Key, bytes: usize) -> bool {
    make_for(templates, key, bytes, true)
}

fn make_for(templates: &Templates, key: &Key, bytes: usize, used: bool) -> bool {
    let work = templates.begin(key).unwrap();
    fs::write(work.dir().join("checkpoint.img"), b"state").unwrap();
    fs::write(work.dir().join("pages.img"), vec![1; bytes]).unwrap();
    work.finish(Marker::new([9; 32]), used).unwrap()
}

#[test]
fn a_template_is_found_by_all_that_it_depends_on_and_by_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let templates = open(dir.path(), 1 << 20);
    let one = key(&templates, 1);
    assert!(templates.find(&one).is_none());
    assert!(make(&templates, &one, 1000));
    assert_eq!(templates.find(&one).unwrap().marker, Marker::new([9; 32]));
    assert!(templates.begin(&one).is_none(), "there is one");
    assert_eq!(key(&templates, 1), one, "whose it is and where it runs is nothing that it depends on");
    let mut others = vec![key(&templates, 2), key(&open(&dir.path().join("other"), 1), 1)];
    assert_eq!(others.pop(), Some(one.clone()), "nor is the directory");
    let change = |change: fn(&mut Launch)| {
        let mut launch = launch();
        change(&mut launch);
        templates.key(&[1; 32], &launch).unwrap()
    };
    others.push(change(|launch| launch.image = "/other".into()));
    others.push(change(|launch| launch.config.pids = None));
    others.push(change(|launch| launch.config.disk_bytes = 7));
    others.push(change(|launch| launch.resources.cpus = Some(0.5)));
    let facts = Facts { runsc_version: "two".to_owned(), ..Facts::default() };
    let newer = Templates::open(dir.path().join("newer"), TemplateSettings { max_bytes: 1, facts }).unwrap();
    others.push(key(&newer, 1));
    assert!(others.iter().all(|other| *other != one));
    assert_eq!(change(|launch| launch.config.marker = "bb".to_owned()), one);
}

#[test]
fn what_nobody_has_asked_for_takes_the_place_of_nothing_that_was_used() {
    let dir = tempfile::tempdir().unwrap();
    let templates = open(dir.path(), 120_000);
    let (old, ahead) = (key(&templates, 1), key(&templates, 2));
    assert!(make(&templates, &old, 70_000));
    assert!(make_for(&templates, &ahead, 70_000, false));
    assert!(templates.find(&old).is_some() && templates.find(&ahead).is_none());
    // Once it is used it is as good as any other.
    assert!(make_for(&templates, &ahead, 10_000, false));
    drop(templates.find(&ahead).unwrap());
    assert!(make(&templates, &key(&templates, 3), 40_000));
    assert!(templates.find(&old).is_none() && templates.find(&ahead).is_some());
    // Only a few of them wait.
    let waiting: Vec<_> = std::iter::from_fn(|| templates.ahead()).collect();
    assert_eq!(waiting.len(), MAX_AHEAD);
}

#[test]
fn what_was_not_used_for_the_longest_time_goes_first_and_what_is_in_use_stays() {
    let dir = tempfile::tempdir().unwrap();
    let templates = open(dir.path(), 250_000);
    let keys: Vec<Key> = (0..4).map(|snapshot| key(&templates, snapshot)).collect();
    let there = |templates: &Templates| keys.iter().map(|key| templates.inner.place(key).exists()).collect::<Vec<_>>();
    for key in &keys[..2] {
        assert!(make(&templates, key, 100_000));
        // Times of files are not finer than a tick.
        thread::sleep(Duration::from_millis(20));
    }
    drop(templates.find(&keys[0]).unwrap());
    thread::sleep(Duration::from_millis(20));
    assert!(make(&templates, &keys[2], 100_000));
    assert_eq!(there(&templates), [true, false, true, false]);
    let held = templates.find(&keys[0]).unwrap();
    thread::sleep(Duration::from_millis(20));
    drop(templates.find(&keys[2]).unwrap());
    assert!(make(&templates, &keys[3], 100_000));
    assert_eq!(there(&templates), [true, false, false, true]);
    drop(held);
    let too_large = key(&templates, 9);
    assert!(!make(&templates, &too_large, 300_000), "larger than all of them may be");
    assert!(templates.begin(&too_large).is_none(), "and not tried again");
    assert_eq!(there(&templates), [true, false, false, true]);
    // A server that may keep less does so when it starts.
    assert_eq!(there(&open(dir.path(), 150_000)), [false, false, false, true]);
}

#[test]
fn what_is_not_what_it_was_is_removed_and_half_a_template_is_never_one() {
    let dir = tempfile::tempdir().unwrap();
    let templates = open(dir.path(), 1 << 20);
    let (one, two) = (key(&templates, 1), key(&templates, 2));
    assert!(make(&templates, &one, 1000) && make(&templates, &two, 1000));
    // As many bytes as before.
    fs::write(templates.inner.place(&one).join("pages.img"), vec![2; 1000]).unwrap();
    assert!(templates.find(&one).is_none());
    assert!(!templates.inner.place(&one).exists());
    // One that is being made when the server is killed.
    let work = templates.begin(&one).unwrap();
    assert!(templates.begin(&one).is_none(), "one is being made");
    fs::write(work.dir().join("checkpoint.img"), b"half").unwrap();
    std::mem::forget(work);
    let templates = open(dir.path(), 1 << 20);
    assert!(templates.find(&one).is_none() && templates.find(&two).is_some());
    assert_eq!(fs::read_dir(&templates.inner.dir).unwrap().count(), 1);
    // One that was given up leaves room for the next.
    drop(templates.begin(&one).unwrap());
    assert!(make(&templates, &one, 10));
    // After another boot nothing is certain.
    let about = templates.inner.place(&two).join(ABOUT);
    let text = fs::read_to_string(&about).unwrap().replace(templates.inner.boot.trim(), "another boot");
    fs::write(&about, text).unwrap();
    let templates = open(dir.path(), 1 << 20);
    assert!(templates.find(&two).is_none() && templates.find(&one).is_some());
}
