//! Promise: a Hugging Face Hub id works wherever a path does; files reach the shared cache complete or not at all; a
//! push sends only changes; every error names a remedy; a token is never shown.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use medusa::model::weights::torch_file;
use medusa::model::weights::{Planned, WeightFiles, save};
use serde_json::Value;
use tch::Device;
use tempfile::TempDir;

use self::server::{Pages, SIGNATURE, Server, TOKEN, Trouble, git_hash, sha256};
use super::small_run::{Ended, SmallRun};

mod server;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/tiny/backbone");

/// A Hub server, and a user with an empty home.
struct World {
    server: Server,
    home: TempDir,
}

impl World {
    fn new() -> Self {
        Self { server: Server::start(), home: tempfile::tempdir().expect("a temporary folder") }
    }

    /// Adds data/tiny's backbone as `org/tiny`: two shards, and files that a download must skip.
    fn with_tiny() -> Self {
        let world = Self::new();
        let read = |name: &str| fs::read(Path::new(TINY).join(name)).expect("the tiny backbone");
        let [first, second, index] = shards();
        let mut files = vec![
            ("model-00001-of-00002.safetensors", first),
            ("model-00002-of-00002.safetensors", second),
            ("model.safetensors.index.json", index),
            ("consolidated.safetensors", b"a second copy".to_vec()),
            ("pytorch_model.bin", b"a pickle".to_vec()),
            ("original/config.json", b"{}".to_vec()),
            ("README.md", b"# Tiny".to_vec()),
        ];
        let companions = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
        files.extend(companions.map(|name| (name, read(name))));
        world.server.add("models/org/tiny", &files);
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn repo_folder(&self) -> PathBuf {
        self.path("hub/models--org--tiny")
    }

    /// A program's environment: this Hub, this home, and a proxy that must not be used for localhost.
    fn with_environment<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "NO_PROXY"]
        {
            command.env_remove(name);
        }
        let proxy = "http://user:password@127.0.0.1:9";
        command.env("HF_ENDPOINT", self.server.endpoint()).env("HF_HOME", self.home.path());
        command.envs([("HTTP_PROXY", proxy), ("HTTPS_PROXY", proxy), ("ALL_PROXY", proxy)]);
        command.envs([("OMP_NUM_THREADS", "1"), ("MEDUSA_CUDA", "off")]).current_dir(self.home.path())
    }

    fn medusa(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Ended {
        let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
        self.with_environment(&mut command).args(arguments).envs(environment.iter().copied());
        let ended: Ended = command.output().expect("the program starts").into();
        for secret in [TOKEN, "hf_SomeOther", SIGNATURE, "password"] {
            assert!(!ended.stdout.contains(secret) && !ended.stderr.contains(secret), "{secret} is shown: {ended:?}");
        }
        ended
    }

    fn generate(&self, backbone: &str, environment: &[(&str, &str)]) -> Ended {
        let arguments = ["generate", "--backbone", backbone, "--prompt", "The", "--max-new-tokens", "4", "--json"];
        self.medusa(&arguments, environment)
    }

    fn refused(&self, backbone: &str, environment: &[(&str, &str)], facts: &[&str]) {
        self.generate(backbone, environment).failed(1, facts);
    }

    fn push(&self, arguments: &[&str]) -> Ended {
        let push = ["push", "run", "--repo", "org/heads"];
        self.medusa(&[&push, arguments].concat(), &[("HF_TOKEN", TOKEN)])
    }

    /// Output of scripts/server/hub_client.py.
    fn python(&self, arguments: &[&str], offline: &str) -> String {
        let mut command = Command::new(std::env::var("MEDUSA_PYTHON").expect("set, says build.rs"));
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/server/hub_client.py");
        self.with_environment(&mut command).arg(script).args(arguments);
        command.envs([("HF_TOKEN", TOKEN), ("HF_HUB_OFFLINE", offline), ("HF_HUB_DISABLE_XET", "1")]);
        command.env("NO_PROXY", "127.0.0.1,localhost"); // this client has no built-in exception for localhost
        let ended: Ended = command.output().expect("Python starts").into();
        ended.succeeded().stdout.trim().to_owned()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, bytes)).expect("a file");
    }
}

/// The tiny backbone's weights in two files, and their index.
fn shards() -> [Vec<u8>; 3] {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let files = WeightFiles::open_file(&Path::new(TINY).join("model.safetensors")).expect("weights");
    let names = files.names();
    let mut index = serde_json::Map::new();
    let mut bytes = Vec::new();
    for (number, half) in [1, 2].into_iter().zip(names.chunks(names.len().div_ceil(2))) {
        let name = format!("model-{number:05}-of-00002.safetensors");
        let tensor = |name: &&str| {
            let shape = files.shape(name).expect("a shape");
            let kind = files.mapped(name, &shape).expect("a tensor").kind();
            ((*name).to_owned(), files.tensor(name, &shape, kind, Device::Cpu).expect("a tensor"))
        };
        let tensors: Vec<_> = half.iter().map(tensor).collect();
        let by_name: Vec<_> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save(&folder.path().join(&name), &by_name).expect("a shard");
        bytes.push(fs::read(folder.path().join(&name)).expect("a shard"));
        index.extend(half.iter().map(|tensor| ((*tensor).to_owned(), Value::from(name.clone()))));
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": index}).to_string().into_bytes();
    let [first, second] = bytes.try_into().expect("two shards");
    [first, second, index]
}

/// The generated tokens.
fn answer(ended: &Ended) -> Value {
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let printed: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    printed["new_ids"].clone()
}

/// Names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_backbone_comes_by_its_id_into_the_cache_of_all_programs() {
    let world = World::with_tiny();
    let here = world.generate(TINY, &[]).succeeded();
    assert!(world.server.state().seen.is_empty(), "a path asks nobody");
    let from_hub = world.generate("org/tiny", &[("HF_TOKEN", TOKEN)]).succeeded();
    assert_eq!(answer(&from_hub), answer(&here));
    let commit = world.server.state().repos["models/org/tiny"].commit_of("main");
    assert_eq!(fs::read_to_string(world.repo_folder().join("refs/main")).expect("a ref"), commit);
    let snapshot = world.repo_folder().join("snapshots").join(&commit);
    let wanted = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&snapshot), wanted, "what is needed, and nothing else");
    let link = fs::read_link(snapshot.join(wanted[2])).expect("a link");
    let [first, ..] = shards();
    assert_eq!(link, Path::new("../../blobs").join(sha256(&first)));
    let link = fs::read_link(snapshot.join("config.json")).expect("a link");
    let config = fs::read(Path::new(TINY).join("config.json")).expect("a config");
    assert_eq!(link, Path::new("../../blobs").join(git_hash(&config)));
    assert!(world.server.seen("GET", "/resolve/").iter().all(|seen| seen.has_token));
    let store = world.server.seen("GET", "/cdn/");
    assert!(store.len() == 2 && store.iter().all(|seen| !seen.has_token), "another host gets no token");

    let changed =
        || fs::metadata(world.repo_folder().join("refs/main")).and_then(|file| file.modified()).expect("a time");
    let before = changed();
    world.server.forget();
    world.generate("org/tiny@main", &[]).succeeded();
    assert_eq!(world.server.seen("GET", "/resolve/").len(), 0, "all is here");
    assert!(changed() == before && names(&world.repo_folder()) == ["blobs", "refs", "snapshots"], "nothing to write");
    world.server.forget();
    fs::create_dir(world.path("token")).expect("a token that cannot be read");
    assert_eq!(answer(&world.generate("org/tiny", &[("HF_HUB_OFFLINE", "1")])), answer(&here));
    assert!(world.server.state().seen.is_empty(), "offline asks nobody");
}

/// The tiny backbone's weights as torch.save writes them: two files and their index.
fn torch_shards() -> Vec<(&'static str, Vec<u8>)> {
    const INDEX: &str = "pytorch_model.bin.index.json";
    const SHARDS: [&str; 2] = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let weights = WeightFiles::open_file(&Path::new(TINY).join("model.safetensors")).expect("weights");
    let tensor = |name: &str| weights.mapped(name, &weights.shape(name).expect("a shape")).expect("a tensor");
    let names = weights.names();
    let (mut weight_map, mut files) = (serde_json::Map::new(), Vec::new());
    for (shard, half) in SHARDS.into_iter().zip(names.chunks(names.len().div_ceil(2))) {
        let planned: Vec<Planned> = half.iter().map(|name| Planned::of((*name).into(), &tensor(name))).collect();
        let path = folder.path().join(shard);
        torch_file::save(&path, &planned, &mut |at| Ok(tensor(half[at]))).expect("a shard");
        weight_map.extend(half.iter().map(|name| ((*name).to_owned(), shard.into())));
        files.push((shard, fs::read(path).expect("a shard")));
    }
    files.push((INDEX, serde_json::json!({ "weight_map": weight_map }).to_string().into_bytes()));
    files
}

#[test]
fn a_repository_without_safetensors_gives_its_torch_files() {
    let world = World::new();
    let read = |name: &'static str| (name, fs::read(Path::new(TINY).join(name)).expect("the tiny backbone"));
    let companions = ["config.json", "tokenizer.json", "tokenizer_config.json"].map(read);
    let (shards, unneeded) = (torch_shards(), [("training_args.bin", vec![1]), ("README.md", vec![])]);
    let old = [&companions[..], &shards, &unneeded].concat();
    world.server.add("models/org/old", &old);
    world.server.add("models/org/new", &[&old[..], &[read("model.safetensors")]].concat());
    let here = answer(&world.generate(TINY, &[]));
    for (repo, weights) in
        [("org/old", shards.iter().map(|(name, _)| *name).collect()), ("org/new", vec!["model.safetensors"])]
    {
        assert_eq!(answer(&world.generate(repo, &[])), here);
        let commit = world.server.state().repos[&format!("models/{repo}")].commit_of("main");
        let snapshot = world.path(&format!("hub/models--{}/snapshots/{commit}", repo.replace('/', "--")));
        let mut expected: Vec<&str> = companions.iter().map(|(name, _)| *name).chain(weights).collect();
        expected.sort_unstable();
        assert_eq!(names(&snapshot), expected);
    }
}

#[test]
fn a_repository_of_gguf_files_gives_the_one_of_a_quantisation() {
    let world = World::new();
    let gguf = crate::gguf::llama().bytes();
    let path = world.path("small.gguf");
    medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, &gguf)).expect("a file");
    let others = [("README.md", vec![]), ("small-Q4_K_M.gguf", b"GGUF".to_vec()), ("mmproj-f16.gguf", vec![1])];
    world.server.add("models/org/small", &[&others[..], &[("small-Q8_0.gguf", gguf)]].concat());
    let here = answer(&world.generate(path.to_str().expect("UTF-8"), &[]));
    for id in ["org/small:q8_0", "org/small/small-Q8_0.gguf", "org/small@main:Q8_0"] {
        assert_eq!(answer(&world.generate(id, &[])), here, "{id}");
    }
    let commit = world.server.state().repos["models/org/small"].commit_of("main");
    assert_eq!(names(&world.path(&format!("hub/models--org--small/snapshots/{commit}"))), ["small-Q8_0.gguf"]);
    world.refused("org/small:Q6_K", &[], &["GGUF file of one model in Q6_K", "small-Q8_0.gguf"]);
}

#[test]
fn a_broken_download_goes_on_where_it_stopped_also_in_another_process() {
    let world = World::with_tiny();
    world.server.fail("/cdn/", Trouble::Break(300_000), 3);
    let ended = world.generate("org/tiny", &[]).succeeded();
    assert!(ended.stderr.contains("org/tiny: "), "it says what comes: {}", ended.stderr);
    let ranges: Vec<_> = world.server.seen("GET", "/cdn/").into_iter().filter_map(|seen| seen.range).collect();
    assert_eq!(ranges.len(), 3, "{ranges:?}");

    let world = World::with_tiny();
    let [first, second, _] = shards();
    let hash = sha256(&first);
    for shard in [&hash, &sha256(&second)] {
        world.server.fail(shard, Trouble::Break(300_000), 1);
    }
    world.server.fail("/cdn/", Trouble::Break(0), 100);
    world.refused(
        "org/tiny",
        &[],
        &["model-0000", "stopped at 300000 of", "run the command again to continue from there"],
    );
    assert!(names(&world.repo_folder().join("blobs")).contains(&format!("{hash}.incomplete")));
    world.server.forget();
    world.generate("org/tiny", &[]).succeeded();
    let ranges: Vec<_> = world.server.seen("GET", "/cdn/").into_iter().filter_map(|seen| seen.range).collect();
    assert_eq!(ranges, ["bytes=300000-", "bytes=300000-"]);
    assert!(!names(&world.repo_folder().join("blobs")).iter().any(|name| name.ends_with(".incomplete")));
}

#[test]
fn two_processes_download_a_file_once() {
    let world = World::with_tiny();
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
        let arguments = ["generate", "--backbone", "org/tiny", "--prompt", "The", "--max-new-tokens", "1"];
        world.with_environment(&mut command).args(arguments).spawn().expect("the program starts")
    };
    let both = [start(), start()];
    assert!(both.into_iter().all(|mut program| program.wait().expect("it ends").success()));
    assert_eq!(world.server.seen("GET", "/cdn/").len(), 2, "each shard once");
}

#[test]
fn a_damaged_download_is_thrown_away_with_words() {
    for (path, hash) in [("/cdn/", "SHA-256"), ("tokenizer.json", "git's hash")] {
        let world = World::with_tiny();
        world.server.fail(path, Trouble::Corrupt, 100);
        let ended = world.generate("org/tiny", &[]);
        ended.failed(1, &["is damaged: expected", hash, "it was deleted, run the command again"]);
        let expected = ended.stderr.split(hash).nth(1).and_then(|rest| rest.split([' ', ',']).nth(1)).expect("a hash");
        assert!(!names(&world.repo_folder().join("blobs")).iter().any(|name| name.starts_with(expected)));
        world.server.forget();
        world.generate("org/tiny", &[]).succeeded();
    }
}

#[test]
fn a_damaged_beginning_of_an_earlier_download_is_replaced() {
    let world = World::with_tiny();
    let config = fs::read(Path::new(TINY).join("config.json")).expect("a config");
    let [first, ..] = shards();
    let left = |hash: &str| format!("hub/models--org--tiny/blobs/{hash}.incomplete");
    world.write(&left(&git_hash(&config)), b"{\"model_type\": \"other\"");
    world.write(&left(&sha256(&first)), &vec![7; first.len()]);
    let from_hub = world.generate("org/tiny", &[]).succeeded();
    assert_eq!(answer(&from_hub), answer(&world.generate(TINY, &[])));
    assert!(!names(&world.repo_folder().join("blobs")).iter().any(|name| name.ends_with(".incomplete")));
}

#[test]
fn a_list_that_names_a_file_twice_is_refused() {
    let world = World::with_tiny();
    world.server.state().pages = Pages::Twice;
    world.refused("org/tiny", &[], &["listing the files of org/tiny", "README.md twice"]);
}

#[test]
fn every_refusal_says_what_to_do() {
    let world = World::with_tiny();
    let wrong = [("HF_TOKEN", "hf_SomeOther")];
    world.refused(
        "org/nothing",
        &[],
        &["no model org/nothing", "check the spelling", "needs HF_TOKEN (no token was sent)"],
    );
    world.refused("org/nothing", &[("HF_TOKEN", TOKEN)], &["no model org/nothing", "the token from HF_TOKEN"]);
    world.refused("org/tiny@v9", &[], &["has no revision \"v9\"", "a branch, a tag or a commit hash"]);
    world.refused("org/tiny", &wrong, &["rejected the token from HF_TOKEN", "/settings/tokens"]);
    world.write("token", b"hf_SomeOther\n");
    world.refused("org/tiny", &[], &["rejected the token from", &world.path("token").display().to_string()]);
    fs::remove_file(world.path("token")).expect("the token's file");
    world.write("elsewhere/token", b"hf_SomeOther\n");
    let home = world.home.path().display().to_string();
    let path = world.path("elsewhere/token").display().to_string();
    let environment = [("HOME", home.as_str()), ("HF_TOKEN_PATH", "~/elsewhere/token")];
    world.refused("org/tiny", &environment, &["rejected the token from", &path]);
    world.server.state().repos.get_mut("models/org/tiny").expect("a repository").gated = true;
    let page = format!("{}/org/tiny", world.server.endpoint());
    world.refused("org/tiny", &[("HF_TOKEN", TOKEN)], &["restricted: request it at", &page, "the token from HF_TOKEN"]);
    world.refused("org/tiny", &[], &["restricted", "no token was sent"]);
    world.server.add("models/org/pickled", &[("config.json", b"{}".to_vec()), ("consolidated.00.pth", b"x".to_vec())]);
    world.refused("org/pickled", &[], &["has only consolidated.00.pth weights", "safetensors"]);
    world.refused("org/tiny", &[("HF_TOKEN", "hf with blanks")], &["HF_TOKEN is invalid"]);
    world.refused("org/tiny", &[("HF_ENDPOINT", "huggingface")], &["HF_ENDPOINT is invalid"]);
    let nobody = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|port| port.local_addr()).expect("a port");
    let endpoint = format!("http://{nobody}");
    world.refused(
        "org/tiny",
        &[("HF_ENDPOINT", &endpoint)],
        &["cannot reach", &endpoint, "check the network", "HF_HUB_OFFLINE=1"],
    );
}

#[test]
fn offline_it_says_which_file_is_missing() {
    let world = World::with_tiny();
    let offline = [("HF_HUB_OFFLINE", "1")];
    world.refused(
        "org/tiny",
        &offline,
        &["HF_HUB_OFFLINE is set", "any file of revision main of org/tiny", "unset it to download"],
    );
    world.generate("org/tiny", &[]).succeeded();
    let snapshots = world.repo_folder().join("snapshots");
    let snapshot = snapshots.join(&names(&snapshots)[0]);
    fs::remove_file(snapshot.join("model-00002-of-00002.safetensors")).expect("a link");
    world.refused("org/tiny", &offline, &["lacks model-00002-of-00002.safetensors of org/tiny", "model-00002"]);
}

#[test]
fn a_hub_in_trouble_is_asked_again_when_it_says() {
    let world = World::with_tiny();
    world.server.fail("/api/models/", Trouble::Status(503, Some(1)), 1);
    world.server.fail("/tree/", Trouble::Status(429, Some(0)), 1);
    let ended = world.generate("org/tiny", &[]).succeeded();
    assert!(ended.stderr.contains("answered 503; retrying in 1 s"), "{}", ended.stderr);
    assert!(ended.stderr.contains("answered 429; retrying in 0 s"), "{}", ended.stderr);
    world.server.fail("/api/models/", Trouble::Status(429, Some(0)), 100);
    world.refused(
        "org/tiny",
        &[],
        &["answered 429 to looking up org/tiny (no path here), 5 times", "in trouble", "try again later"],
    );
    world.server.forget();
    world.server.fail("/api/models/", Trouble::Status(503, Some(86_400)), 1);
    world.refused("org/tiny", &[], &["answered 503", "it asks to wait 86400 seconds"]);
}

#[test]
fn a_name_that_leaves_its_folder_is_refused_and_nothing_is_written() {
    for name in ["../../../evil.json", "/evil.json", "a//evil.json", "a\\..\\evil.json", "tokenizer.json\0"] {
        let world = World::new();
        world.server.add("models/org/tiny", &[("config.json", b"{}".to_vec()), (name, b"{}".to_vec())]);
        world.refused("org/tiny", &[], &["a path outside its folder; nothing was written"]);
        assert!(names(world.home.path()).is_empty(), "{name}: {:?}", names(world.home.path()));
    }
}

#[test]
fn a_push_sends_what_changed_in_one_commit() {
    let world = World::new();
    let large: Vec<u8> = (0..5_000_000_u32).map(|at| (at % 251) as u8).collect();
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("heads.safetensors", &large),                    // five parts
        ("backbone/model.safetensors", b"small weights"), // one part
        ("empty.safetensors", b""),
        ("notes.txt", b"words"),
    ];
    for (name, bytes) in files {
        world.write(&format!("run/{name}"), bytes);
    }
    for name in [".hidden", "half.partial", "a.log"] {
        world.write(&format!("run/{name}"), b"stays here");
    }
    let ended = world.push(&["--private", "--message", "First"]).succeeded();
    assert!(ended.stderr.contains("skipped: .hidden, half.partial, a.log"), "{}", ended.stderr);
    {
        let state = world.server.state();
        let repo = &state.repos["models/org/heads"];
        assert!(repo.private);
        let page = format!("{}/org/heads/commit/{}\n", world.server.endpoint(), repo.commit_of("main"));
        assert_eq!(ended.stdout, page);
        let mut there: Vec<_> =
            repo.head("main").iter().map(|(name, file)| (name.as_str(), file.bytes.as_slice())).collect();
        there.retain(|(name, _)| *name != ".gitattributes");
        let mut files = files.to_vec();
        files.sort_unstable();
        assert_eq!(there, files);
    }
    assert_eq!(world.server.seen("PUT", "/store/").len(), 6);
    assert!(world.server.seen("PUT", "/store/").iter().all(|seen| !seen.has_token), "another host gets no token");

    world.server.forget();
    assert_eq!(world.push(&[]).succeeded().stdout, "nothing changed: no commit\n");
    assert!(world.server.seen("POST", "/commit/").is_empty() && world.server.seen("PUT", "").is_empty());

    world.write("run/config.json", b"[]"); // of the same size
    world.write("run/backbone/model.safetensors", b"large weights");
    world.server.fail("/commit/", Trouble::Status(400, None), 1);
    let facts = ["refused committing to org/heads with status 400", "so nothing was committed; push again"];
    world.push(&["--json"]).failed(1, &facts);
    let sent: Value = serde_json::from_str(&world.push(&["--json"]).succeeded().stdout).expect("JSON");
    assert_eq!(sent["files"], serde_json::json!(["backbone/model.safetensors", "config.json"]));
    assert_eq!(sent["unchanged"], 3);
    assert_eq!(world.server.seen("PUT", "/store/").len(), 1, "what an interrupted push sent is not sent again");
}

#[test]
fn a_push_that_cannot_be_is_refused() {
    let world = World::new();
    let push =
        |arguments: &[&str], environment: &[(&str, &str)]| world.medusa(&[&["push"], arguments].concat(), environment);
    let user = [("HF_TOKEN", TOKEN)];
    push(&["run", "--repo", "org/heads"], &user).failed(2, &["run is not a folder"]);
    fs::create_dir(world.path("run")).expect("a folder");
    push(&["run", "--repo", "org/heads"], &user).failed(1, &["run has no file to push"]);
    world.write("run/.hidden", b"x");
    push(&["run", "--repo", "org/heads"], &user).failed(1, &["run has no file to push; skipped: .hidden"]);
    world.write("run/config.json", b"{}");
    assert_eq!(push(&["run", "--repo", "heads"], &user).status, Some(2));
    push(&["run", "--repo", "org/heads"], &[]).failed(1, &["needs a token with write access", "HF_TOKEN"]);
    push(&["run", "--repo", "org/heads"], &[("HF_TOKEN", "hf_SomeOther")]).failed(1, &["rejected the token"]);
    push(&["run", "--repo", "others/heads"], &user)
        .failed(1, &["does not allow making others/heads", "use a token with that permission"]);
    push(&["run", "--repo", "org/heads"], &[user[0], ("HF_HUB_OFFLINE", "1")]).failed(1, &["HF_HUB_OFFLINE"]);
    world.push(&[]).succeeded();
    push(&["run", "--repo", "org/heads", "--private"], &user).failed(1, &["org/heads already exists and is public"]);
    world.write("run/config.json", b"[]");
    world.push(&["--revision", "trial"]).succeeded();
    let state = world.server.state();
    let repo = &state.repos["models/org/heads"];
    assert_eq!(repo.head("trial")["config.json"].bytes, b"[]");
    assert_eq!(repo.head("main")["config.json"].bytes, b"{}");
}

#[test]
fn a_push_whose_answer_is_lost_says_what_the_branch_says() {
    let world = World::new();
    world.write("run/config.json", b"{}");
    world.write("run/heads.safetensors", b"weights");
    // Each request succeeds, but its answer is an error; the retry finds the result.
    for path in ["/api/repos/create", "/branch/", "/commit/"] {
        world.server.fail(path, Trouble::Done(503), 1);
    }
    let ended = world.push(&["--revision", "trial"]).succeeded();
    let commit = world.server.state().repos["models/org/heads"].commit_of("trial");
    assert_eq!(ended.stdout, format!("{}/org/heads/commit/{commit}\n", world.server.endpoint()));
    assert_eq!(world.server.state().repos["models/org/heads"].head("trial")["config.json"].bytes, b"{}");
    assert_eq!(world.server.seen("POST", "/commit/").len(), 2);
    assert_eq!(world.server.seen("POST", "/repos/create").len(), 2);
    world.write("run/config.json", b"[]");
    world.server.forget();
    world.server.fail("/commit/", Trouble::Break(0), 1);
    world.push(&["--revision", "trial"]).succeeded();
    assert_eq!(world.server.seen("POST", "/commit/").len(), 1, "the answer broke off after the commit");

    world.write("run/config.json", b"[1]");
    world.server.forget();
    world.server.fail("/commit/", Trouble::Status(504, Some(0)), 5);
    world
        .push(&[])
        .failed(1, &["answered 504", "the commit may still arrive", "check the branch before pushing again"]);
    world.server.fail("/commit/", Trouble::Gone, 1);
    world.push(&[]).failed(1, &["answered 503 to committing", "so the commit may or may not exist; push again"]);
    world.server.forget();
    world.server.fail("/commit/", Trouble::Raced, 1);
    let raced = world.push(&[]);
    let commit = world.server.state().repos["models/org/heads"].commit_of("main");
    raced.failed(1, &["changed during the push", &format!("moved on to {commit}, which does not contain")]);
    world.push(&[]).succeeded();
    assert_eq!(world.server.state().repos["models/org/heads"].head("main")["config.json"].bytes, b"[1]");
}

#[test]
fn pages_of_a_list_elsewhere_are_followed_without_the_token_or_refused() {
    let world = World::with_tiny();
    world.server.state().next_page = Some("http://localhost");
    world.generate("org/tiny", &[("HF_TOKEN", TOKEN)]).succeeded();
    let pages = world.server.seen("GET", "/tree/");
    assert!(pages.len() > 2 && pages[0].has_token && !pages[1..].iter().any(|page| page.has_token), "{pages:?}");
    world.server.state().next_page = Some("ftp://localhost");
    let mirror = world.server.endpoint().replace("127.0.0.1", "localhost");
    world.server.fail("/tree/", Trouble::Elsewhere, 1);
    let facts = [
        &format!("{mirror} sent an invalid response to listing the files of org/tiny"),
        "a next page at ftp://localhost;",
    ];
    world.refused("org/tiny", &[], &facts);
    let mut state = world.server.state();
    (state.next_page, state.pages) = (None, Pages::Repeated);
    drop(state);
    world.refused("org/tiny", &[], &["listing the files of org/tiny", "a next page that was there before"]);
    world.server.state().pages = Pages::Endless;
    world.refused("org/tiny", &[], &["listing the files of org/tiny", "more than 1000 pages of files"]);
}

#[test]
fn errors_name_the_host_that_failed() {
    let world = World::with_tiny();
    let store = world.server.endpoint().replace("127.0.0.1", "localhost");
    world.server.fail("/cdn/", Trouble::Status(403, None), 100);
    world.refused("org/tiny", &[("HF_TOKEN", TOKEN)], &[&format!("{store} refused downloading model-0000")]);
    world.server.forget();
    world.server.fail("/cdn/", Trouble::Status(503, Some(86_400)), 100);
    world.refused("org/tiny", &[], &[&format!("{store} answered 503 to downloading model-0000")]);
    world.server.forget();
    world.server.fail("/api/models/", Trouble::Elsewhere, 1);
    world.refused("org/tiny@v9", &[], &["has no revision \"v9\"", "a branch, a tag or a commit hash"]); // the mirror's answer
}

#[test]
fn an_export_brings_of_the_backbone_what_it_needs_and_its_card_names_it() {
    let world = World::new();
    let small = run_from_the_hub(&world);
    let train = world.with_environment(&mut small.trainer(&[])).current_dir(small.root()).output();
    Ended::from(train.expect("it starts")).succeeded();
    let world = World { home: tempfile::tempdir().expect("a temporary folder"), ..world };
    let heads = small.path("run/final").display().to_string();
    let export = |format: &str, more: &[&str]| {
        let arguments = ["export", "--heads", &heads, "--format", format, "--out", format];
        world.medusa(&[&arguments, more].concat(), &[]).succeeded();
        fs::read_to_string(world.path(format).join("README.md")).expect("a card")
    };
    world.server.forget();
    fs::create_dir(world.path("org")).expect("a folder that is none of the backbone's");
    let card = export("heads", &[]);
    fs::remove_dir(world.path("org")).expect("a folder");
    assert!(card.starts_with("---\nbase_model: org/small\n") && world.server.state().seen.is_empty(), "{card}");
    let card = export("tgi", &["--backbone", "org/small"]);
    assert!(card.contains("\nbase_model: org/small\n") && card.contains("# Medusa heads for org/small\n"), "{card}");
    assert!(world.server.seen("GET", "/cdn/").is_empty(), "config.json is enough");
    assert!(export("merged", &[]).contains("\nbase_model: org/small\n"));
    assert_eq!(world.server.seen("GET", "/cdn/").len(), 1, "the weights are in it");
    let base = small.path("backbone").display().to_string();
    let card = export("tensorrt-llm", &["--backbone", &base]);
    assert!(!card.contains("base_model:") && card.contains("--model_dir BACKBONE"), "given by a path: {card}");
    small.edit_trusted("run/final/config.json", "org/small", "some/path");
    assert!(!export("vllm", &[]).contains("base_model:"), "a path is no id");
    let printed = world.medusa(&["export", "--heads", &heads, "--format", "heads", "--out", "told"], &[]).succeeded();
    assert!(printed.stderr.contains(
        "because the backbone (some/path) is not known to be on the Hub; if it is, add `base_model: OWNER/NAME`"
    ));
}

#[test]
fn offline_a_data_set_is_whole_or_refused() {
    let world = World::new();
    let small = run_from_the_hub(&world);
    let rows = |name| (name, small.bytes("rows.jsonl"));
    world.server.add("datasets/org/rows", &[rows("data/a.jsonl"), rows("data/b.jsonl"), rows("data/c.jsonl")]);
    small.edit("recipe.toml", "[\"org/rows@main/data/test.jsonl\"]", "[\"validation.jsonl\"]");
    let check = |data: &str, offline: &str| -> Ended {
        let recipe = small.read("recipe.toml");
        small.edit("recipe.toml", "[\"org/rows\"]", &format!("[\"{data}\"]"));
        let mut command = small.trainer(&["--check"]);
        let ended =
            world.with_environment(&mut command).env("HF_HUB_OFFLINE", offline).current_dir(small.root()).output();
        small.write("recipe.toml", recipe);
        ended.expect("it starts").into()
    };
    check("org/rows/data/a.jsonl", "").succeeded();
    check("org/rows/data/a.jsonl", "1").succeeded();
    check("org/rows", "1").failed(1, &["lacks data/b.jsonl of org/rows", "unset it to download"]);
    check("org/rows", "").succeeded();
    check("org/rows", "1").succeeded();
    let lists = world.path("hub/datasets--org--rows/.medusa");
    assert_eq!(names(&lists).len(), 1);
    fs::remove_dir_all(&lists).expect("the lists"); // as after a download by another program
    check("org/rows", "1").failed(1, &["lacks the list of all files (which others do not keep) of org/rows"]);
    check("org/rows/data/a.jsonl", "1").succeeded();
}

#[test]
fn a_config_and_a_split_are_one_entry_of_a_mix() {
    let world = World::new();
    let small = run_from_the_hub(&world);
    let rows = |name| (name, small.bytes("rows.jsonl"));
    let files = [rows("en/train-0.jsonl"), rows("en/train-1.jsonl"), rows("en/test-0.jsonl"), rows("fr/train-0.jsonl")];
    world.server.add("datasets/org/talks", &files);
    small.write("validation_here.jsonl", small.bytes("validation.jsonl"));
    small.edit("recipe.toml", "[\"org/rows@main/data/test.jsonl\"]", "[\"validation_here.jsonl\"]");
    small.edit("recipe.toml", "[\"org/rows\"]", "[\"org/talks:en:train\", \"rows.jsonl\"]\nmix = [3.0, 1.0]");
    let check = || -> Ended {
        let mut command = small.trainer(&["--check"]);
        world.with_environment(&mut command).current_dir(small.root()).output().expect("it starts").into()
    };
    let printed = check().succeeded().stdout;
    let shares: Vec<&str> = printed.lines().filter(|line| line.starts_with("mix  ")).collect();
    assert!(shares.len() == 2 && shares[0].contains("org/talks:en:train: 75.0 %"), "{printed}");
    assert!(printed.contains("in 3 files"), "{printed}");
    small.edit("recipe.toml", "org/talks:en:train", "org/talks:de:train");
    check().failed(1, &["recipe.toml:", "data.train: ", "no data files of config \"de\"", "fr/train-0.jsonl"]);
}

/// A small run whose backbone and rows are on the Hub.
fn run_from_the_hub(world: &World) -> SmallRun {
    let small = SmallRun::new();
    let of = |name: &str| small.bytes(name);
    let backbone =
        [("config.json", of("backbone/config.json")), ("model.safetensors", of("backbone/model.safetensors"))];
    world.server.add("models/org/small", &backbone);
    let rows =
        [("data/train.jsonl", of("rows.jsonl")), ("data/test.jsonl", of("validation.jsonl")), ("README.md", vec![])];
    world.server.add("datasets/org/rows", &rows);
    small.edit("recipe.toml", "path = \"backbone\"", "path = \"org/small\"");
    small.edit("recipe.toml", "[\"rows.jsonl\"]", "[\"org/rows\"]");
    small.edit("recipe.toml", "[\"validation.jsonl\"]", "[\"org/rows@main/data/test.jsonl\"]");
    small
}

#[test]
fn a_recipe_names_the_hub_and_the_run_says_which_state_of_it() {
    let world = World::new();
    let small = run_from_the_hub(&world);
    let train = |arguments: &[&str]| -> Ended {
        world
            .with_environment(&mut small.trainer(arguments))
            .current_dir(small.root())
            .output()
            .expect("it starts")
            .into()
    };
    train(&["--check"]).succeeded();
    assert!(world.server.seen("GET", "/cdn/").is_empty(), "--check needs no weights");
    train(&[]).succeeded();
    let json = |name: &str| -> Value { serde_json::from_str(&small.read(name)).expect("JSON") };
    let commit = world.server.state().repos["models/org/small"].commit_of("main");
    let provenance = json("run/provenance.json");
    assert_eq!(provenance["backbone"], serde_json::json!({"id": "org/small", "commit": commit}));
    let rows = world.server.state().repos["datasets/org/rows"].commit_of("main");
    let source = |key: &str| serde_json::json!({"key": key, "id": "org/rows", "commit": rows});
    assert_eq!(provenance["sources"], serde_json::json!([source("data.train"), source("data.validation")]));
    assert_eq!(json("run/final/config.json")["base_model_name_or_path"], "org/small");
    world.server.forget();
    train(&[]).failed(1, &["train.output_dir run", "is not empty"]);
    assert!(
        world.server.state().seen.is_empty(),
        "an output folder that is taken is told before anything is asked for"
    );
    assert!(small.read("run/recipe.toml").contains("path = \"org/small\""), "as it was written");
    let other = SmallRun::new();
    other.train(&[]).succeeded();
    assert_eq!(small.bytes("run/final/heads.safetensors"), other.bytes("run/final/heads.safetensors"), "as from files");

    let of = |name: &str| small.bytes(&format!("backbone/{name}"));
    let backbone = [("config.json", of("config.json")), ("model.safetensors", of("model.safetensors")), ("x", vec![])];
    world.server.add("models/org/small", &backbone);
    train(&["--resume"]).failed(1, &["holds a run on org/small at commit", &commit, "HF_HUB_OFFLINE=1"]);
    small.edit("recipe.toml", "[\"org/rows\"]", "[\"org/nothing\"]");
    train(&["--check"]).failed(1, &["recipe.toml:", "data.train: ", "no data set org/nothing"]);
    small.edit("recipe.toml", "[\"org/nothing\"]", "[\"org/rows/nothing.jsonl\"]");
    train(&["--check"])
        .failed(1, &["org/rows has no file \"nothing.jsonl\"; it has data/test.jsonl, data/train.jsonl"]);
}

#[test]
fn heads_go_there_and_come_back_and_files_name_the_commits() {
    let world = World::new();
    let small = run_from_the_hub(&world);
    let train = world.with_environment(&mut small.trainer(&[])).current_dir(small.root()).output();
    Ended::from(train.expect("it starts")).succeeded();
    let heads = small.path("run/final").display().to_string();
    world.medusa(&["push", &heads, "--repo", "org/small-heads"], &[("HF_TOKEN", TOKEN)]).succeeded();
    let inputs = "--backbone org/small --heads org/small-heads@main --data org/rows/data/test.jsonl --out c.json";
    let calibrate: Vec<&str> = ["calibrate"].into_iter().chain(inputs.split(' ')).collect();
    world.medusa(&calibrate, &[]).succeeded();
    let nowhere =
        ["calibrate", "--backbone", "org/small", "--heads", "org/nothing", "--data", "x.jsonl", "--out", "x.json"];
    fs::remove_dir_all(world.path("hub/models--org--small")).expect("a folder to remove");
    world.medusa(&nowhere, &[]).failed(1, &["no model org/nothing"]);
    assert!(!world.path("hub/models--org--small").exists(), "weights come last");
    let read = || fs::read(world.path("c.json")).expect("a calibration");
    let calibration: Value = serde_json::from_slice(&read()).expect("JSON");
    let commit = world.server.state().repos["models/org/small"].commit_of("main");
    assert_eq!(calibration["backbone"], format!("org/small@{commit}"));
    let from_hub = read();
    let files = ["calibrate", "--backbone", "org/small", "--heads", &heads, "--out", "c.json", "--data"];
    let rows = small.path("validation.jsonl").display().to_string();
    world.medusa(&[&files[..], &[&rows]].concat(), &[]).succeeded();
    assert_eq!(read(), from_hub, "as from files");
    world.medusa(&[&files[..], &["org/rows"]].concat(), &[]).succeeded();
    assert_eq!(read(), from_hub, "of a whole data set, what was not trained on");
}

#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with huggingface_hub")]
fn pythons_library_is_a_second_client_and_shares_the_cache() {
    let world = World::with_tiny();
    let here = world.generate(TINY, &[]);
    let snapshot = world.python(&["download", "org/tiny"], "0");
    let offline = world.generate("org/tiny", &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(answer(&offline), answer(&here), "what Python downloaded is used here");

    let world = World { home: tempfile::tempdir().expect("a temporary folder"), ..world };
    world.generate("org/tiny", &[]).succeeded();
    world.server.forget();
    let again = world.python(&["download", "org/tiny"], "1");
    assert!(world.server.state().seen.is_empty(), "offline asks nobody");
    assert_eq!(Path::new(&again).file_name(), Path::new(&snapshot).file_name(), "what came here is used by Python");
    world.python(&["download", "org/tiny"], "0");
    assert!(world.server.seen("GET", "/cdn/").iter().all(|seen| seen.range.is_none()));
    let fetched = world.server.seen("GET", "/cdn/").len();
    assert_eq!(fetched, 2, "Python took consolidated.safetensors and the .bin, and no shard again");

    world.write("run/heads.safetensors", &vec![7; 3_000_000]);
    world.write("run/config.json", b"{}");
    world.python(&["upload", "org/heads", "run"], "0");
    world.server.forget();
    assert_eq!(world.push(&[]).succeeded().stdout, "nothing changed: no commit\n", "what Python pushed is known here");
    world.write("run/config.json", b"[]");
    world.push(&[]).succeeded();
    world.server.forget();
    world.python(&["upload", "org/heads", "run"], "0");
    assert!(world.server.seen("POST", "/commit/").is_empty(), "what was pushed here is known to Python");
}
