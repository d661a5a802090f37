//! A command opens the backbone's config.json and the heads once: what was checked is what is used.

use std::mem::MaybeUninit;

use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};

use super::*;

/// How often a command that succeeds opens each of these files. The kernel tells of each end, too: it counts events of one kind that
/// follow each other as one.
fn times_opened<const N: usize>(world: &World, arguments: &[&str], files: [&str; N]) -> [usize; N] {
    let events = init(CreateFlags::NONBLOCK).expect("inotify");
    let flags = WatchFlags::OPEN | WatchFlags::CLOSE;
    let watches = files.map(|file| add_watch(&events, world.path(file), flags).expect("a file"));
    world.medusa(arguments).assert().success();
    let (mut buffer, mut counts) = ([MaybeUninit::uninit(); 4096], [0; N]);
    let mut reader = Reader::new(&events, &mut buffer);
    while let Ok(event) = reader.next() {
        let at = watches.iter().position(|watch| *watch == event.wd()).expect("a watched file");
        counts[at] += usize::from(event.events().contains(rustix::fs::inotify::ReadFlags::OPEN));
    }
    counts
}

#[test]
fn a_command_opens_config_and_heads_once() {
    let world = World::new();
    world.write("h/config.json", &json!({"backbone_dtype": "float32"}));
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    let files = ["b/config.json", "h/config.json", "h/heads.safetensors"];
    let decode = ["--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "2"];
    for verb in [&["generate"][..], &["bench", "--repeats", "1"]] {
        assert_eq!(times_opened(&world, &[verb, &decode, &TREE].concat(), files), [1; 3], "{verb:?}");
    }
}
