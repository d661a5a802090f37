//! Inputs with one mistake each, that readers name.

use serde_json::{Value, json};

use super::{Seeds, bytes, header, root, unprefixed};

pub(super) fn add(seeds: &mut Seeds) {
    recipes(seeds);
    data_folders(seeds);
    rows(seeds);
    prompts(seeds);
    requests(seeds);
    templates(seeds);
    configs(seeds);
    tensors(seeds);
    torch_files(seeds);
    heads(seeds);
    hub(seeds);
    folders(seeds);
}

/// What contradicts itself: keys of the backbone, of the data, and further tables.
const CLASHES: [[&str; 3]; 6] = [
    ["", "", "[stage.medusa2]\n[train]\nhidden_state_cache = \"states\""],
    ["quantization = \"nf4\"", "", "[stage.medusa2.lora]\nrank = 4\nalpha = 8.0"],
    ["", "", "[loss]\non_unlabelled = true"],
    ["", "hidden_states = \"hs\"", "[stage.medusa2]"],
    ["quantization = \"int8\"", "hidden_states = \"hs\"", "[stage.medusa1]"],
    ["", "", "[heads]\nshared_lm_head = true\nw2_rank = 2\ndraft_vocab_size = 4\nshared_w2 = true"],
];

/// Changes of a recipe's text.
const RECIPES: [(&str, &str); 47] = [
    ("medusa_num_heads = 5", "medusa_num_heads = 500"),
    ("micro_batch_size = 8", "micro_batch_size = 100000000"),
    ("gradient_accumulation_steps = 1", "gradient_accumulation_steps = 9223372036854775807"),
    ("learning_rate = 5e-3", "learning_rate = 5e-3\nmedusa_lr_multiplier = 4.0"),
    ("seed = 42", "seed = 42\nrecompute = true"),
    ("[stage.medusa1]", "[stage.medusa2]"),
    ("[stage.medusa1]", "[stage.medusa2]\nself_distillation = true"),
    ("[stage.medusa1]", "[stage.medusa2]\nlambda0 = 0.2\n[stage.medusa2.lora]\nrank = 4\nalpha = 8.0"),
    ("[stage.medusa1]", "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8.0\ntarget_modules = [\"x\"]"),
    ("[stage.medusa1]", "[stage.medusa1]\n[stage.medusa2]"),
    ("[stage.medusa1]", ""),
    ("[stage.medusa1]", "[stage.medusa3]"),
    ("dtype = \"float32\"", "dtype = \"float64\"\nquantization = \"nf4\""),
    ("dtype = \"float32\"", "dtype = \"float32\"\nquantization = \"int8\"\ndevice_map = \"auto\""),
    ("dtype = \"float32\"\n\n[heads]", "dtype = \"float32\"\nquantization = \"nf4\"\n[stage.medusa2]\n[heads]"),
    ("medusa_decay_coefficient = 0.8", "on_unlabelled = \"all\""),
    ("medusa_decay_coefficient = 0.8", "targets = \"backbone\"\non_unlabelled = \"all\""),
    ("medusa_decay_coefficient = 0.8", "medusa_decay_coefficient = -1.0"),
    ("medusa_decay_coefficient = 0.8", "medusa_decay = 0.8"),
    ("warmup_steps = 20", "warmup_steps = 20\nmin_ratio = 0.1"),
    ("name = \"cosine\"\nwarmup_steps = 20", "name = \"constant\"\nmin_ratio = 0.1"),
    ("warmup_steps = 20", "warmup_steps = 20000"),
    ("warmup_steps = 20", "warmup_ratio = 0.1"),
    ("warmup_steps = 20", "warmup_steps = 20\nwarmup_ratio = 0.1"),
    ("name = \"cosine\"\nwarmup_steps = 20", ""),
    ("name = \"cosine\"", "name = \"cosin\""),
    ("train = [\"data/tiny/train.jsonl\"]", "train = []"),
    ("validation = [\"data/tiny/eval.jsonl\"]", "validation = []"),
    ("validation = [\"data/tiny/eval.jsonl\"]", "validation_fraction = 0.0"),
    ("validation = [\"data/tiny/eval.jsonl\"]", "validation_fraction = 0.1"),
    ("validation = [\"data/tiny/eval.jsonl\"]", ""),
    ("shuffle = true", "shuffle = false\nmix = [1.0, 2.0]"),
    ("shuffle = true", "mix = [0.5]"),
    ("packing = true", "hidden_states = \"hs\"\nlong_rows = \"truncate\""),
    ("packing = true", "hidden_states = \"hs\"\ncolumns = { prompt = \"a\" }"),
    ("train = [\"data/tiny/train.jsonl\"]", "hidden_states = \"hs\""),
    ("max_length = 256", "max_length = 3"),
    ("max_length = 256", "max_length = \"256\""),
    ("keep_checkpoints = 2", "patience = 2"),
    ("keep_checkpoints = 2", "keep_best = \"loss\""),
    ("eval_every = 50", "keep_best = \"loss\""),
    ("keep_checkpoints = 2", "hidden_state_cache = \"states\""),
    (
        "medusa_num_layers = 1",
        "medusa_num_layers = 1\nw2_rank = 2\ndraft_vocab_size = 4\nshared_w2 = true\ninit_from = \"a\"",
    ),
    ("medusa_num_layers = 1", "architecture = \"hydra++\"\nw2_bias = true"),
    ("path = \"data/tiny/backbone\"", ""),
    ("max_steps = 200", "steps = 200\nlr = 1"),
    (
        "betas = [0.9, 0.999]\neps = 1e-8\nweight_decay = 0.0\nmax_grad_norm = 1.0",
        "betas = [1.0, 0.999]\neps = 0.0\nmax_grad_norm = -1",
    ),
];

fn recipes(seeds: &mut Seeds) {
    let whole = String::from_utf8(bytes("recipes/tiny_stage1.toml")).expect("a recipe of ours");
    let whole: String = whole.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    for (from, to) in RECIPES {
        assert!(whole.contains(from), "{from:?} is in the recipe");
        seeds.add("recipe", whole.replace(from, to));
    }
    let shortest = "[backbone]\npath = \"b\"\n[data]\ntrain = [\"a\"]\n";
    seeds
        .all("recipe", [shortest, "[backbone", "a = 1", "[backbone]\npath = 1\n[data]\ntrain = \"a\"\n[train]\n[x]\n"]);
    let clashes = CLASHES.map(|[backbone, data, tables]| {
        format!("[backbone]\npath = \"b\"\n{backbone}\n[data]\ntrain = [\"a\"]\n{data}\n{tables}\n")
    });
    seeds.all("recipe", clashes);
    let second = String::from_utf8(bytes("recipes/vicuna7b_stage2.toml")).expect("a recipe of ours");
    for (from, to) in [
        ("[stage.medusa2.lora]", "[stage.medusa2.lor]"),
        ("rank", "ranks"),
        ("[stage.medusa2]", "[stage.medusa2]\nlambda0_schedule = \"x\""),
    ] {
        seeds.add("recipe", second.replace(from, to));
    }
}

/// Rows of every format that the loader takes.
fn data_rows() -> Vec<Value> {
    let many: Vec<u8> = (0..200).map(|id| id % 60).collect();
    vec![
        json!(1),
        json!({}),
        json!({"text": null}),
        json!({"text": 1}),
        json!({"text": ""}),
        json!({"prompt": "a", "completion": ""}),
        json!({"prompt": "", "completion": "a"}),
        json!({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}),
        json!({"prompt": [], "completion": []}),
        json!({"input_ids": many}),
        json!({"input_ids": []}),
        json!({"input_ids": [1, 2], "labels": [1]}),
        json!({"input_ids": [1, 2], "loss_mask": [1]}),
        json!({"input_ids": [1, 2], "loss_mask": [1, 0]}),
        json!({"input_ids": [1, 2], "labels": [-100, -100]}),
        json!({"input_ids": [100_000]}),
        json!({"input_ids": [1, -1]}),
        json!({"input_ids": [1.5]}),
        json!({"input_ids": "1"}),
        json!({"input_ids": [1], "labels": "a"}),
        json!({"input_ids": [1], "labels": null, "loss_mask": null}),
        json!({"messages": 1}),
        json!({"messages": []}),
        json!({"messages": [1]}),
        json!({"messages": [{"role": 1, "content": "a"}]}),
        json!({"messages": [{"role": "user", "content": 1}]}),
        json!({"messages": [{"role": "user", "content": null}]}),
        json!({"messages": [{"role": "user", "content": [1]}, {"role": "assistant", "content": [{"type": "image"}]}]}),
        json!({"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        json!({"messages": [{"role": "user", "content": "a".repeat(400)}, {"role": "assistant", "content": "b".repeat(400)}]}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": " ", "chat_template_kwargs": {"a": 1}}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[{}]", "chat_template_kwargs": 1}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": 1}),
        json!({"conversations": [{"from": "alien", "value": "a"}, {"from": "gpt", "value": null}]}),
        json!({"instruction": "a", "input": "", "output": "b"}),
        json!({"instruction": "a", "input": null, "output": "b"}),
        json!({"instruction": 1, "output": "b"}),
    ]
}

fn data_folders(seeds: &mut Seeds) {
    seeds.all(
        "data_folder",
        [
            "s{\"_data_files\": [{\"filename\": \"../a\"}]}",
            "d{\"splits\": [\"a\", \"b\"]}",
            "r---\nconfigs:\n- config_name: [a\n---",
            "r---\nconfigs: &a [*a, {config_name: a, data_files: [/x, \"a[\"]}]\n---",
            "r---\nconfigs:\n- - - a\n---",
            "s[]",
        ],
    );
}

fn rows(seeds: &mut Seeds) {
    let rows = data_rows();
    for row in &rows {
        seeds.add("rows_jsonl", row.to_string());
    }
    seeds.add("rows_jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    seeds.all(
        "rows_jsonl",
        [
            &b"{\"text\": \"\xff\"}"[..],
            b"[1]",
            b"{\"text\": \"a\", \"text\": \"b\"}",
            b"{\"input_ids\": [1], \"input_ids\": [2]}",
        ],
    );
    seeds.add("rows_json_array", format!("[{}]", rows.iter().map(Value::to_string).collect::<Vec<_>>().join(",\n")));
    seeds.all(
        "rows_json_array",
        [
            "[",
            "[{\"text\": \"a\"},",
            "[{\"text\": \"a",
            "[{\"text\": \"a\"},]",
            "[,]",
            "[{\"text\"\n: ]}]",
            "[{\"text\": \"a\"} {",
            "[\"a\\\"b\", {}]",
            "\u{feff}[{\"text\": \"a\"}]",
            "[1 2]",
            "[]]",
            "[{\"a\": [1, {\"b\": 2}]}]",
        ],
    );
    seeds.all(
        "rows_csv",
        [
            &b"ctext\n\"a"[..],
            b"c\"text",
            b"c",
            b"ctext,text\na,b\n",
            b"ctext\n\xff\n",
            b"ct\xff\na\n",
            b"ctext,id\na,1,2\n",
            b"cinstruction,output,text\n,,\n,,a\nb,c,\n",
            b"cprompt,completion\n,\n",
            b"p<|endoftext|>\n<|endoftext|>\na\r\n\n<|endoftext|>\n\xff\n",
            b"p\n\n",
        ],
    );
    let text = "{\"text\": \"a\"}\n".repeat(40);
    seeds.all("rows_gzip", [&b"r"[..], b"r\x1f\x8b", b"r\x1f\x8b\x08\0\0\0\0\0\0\xff\0\0"]);
    seeds.all("rows_zstd", [&b"r"[..], b"r\x28\xb5\x2f\xfd", text.as_bytes()]);
}

fn prompts(seeds: &mut Seeds) {
    let prompts = [
        json!({}),
        json!({"prompt": 1}),
        json!({"prompt": null}),
        json!({"prompt_ids": [1, 100_000]}),
        json!({"prompt_ids": []}),
        json!({"prompt_ids": [1.5]}),
        json!({"turns": []}),
        json!({"turns": [1]}),
        json!({"turns": "a"}),
        json!({"messages": []}),
        json!({"messages": [{"role": "assistant", "content": "a"}]}),
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "user", "content": "c"}], "tools": []}),
        json!({"messages": [{"role": "system", "content": "a"}]}),
        json!({"messages": [{"role": 1, "content": "a"}]}),
        json!({"conversations": [{"from": "gpt", "value": "a"}]}),
        json!({"prompt": [{"role": "user", "content": "a"}]}),
        json!(1),
    ];
    seeds.all("prompts", prompts.iter().map(Value::to_string));
    seeds.all(
        "prompts",
        [
            "",
            "\"a\"",
            "[1",
            "{\"prompt\": \"a\"",
            "plain text\n",
            "{\"turns\": [\"a\"], \"question_id\": 1, \"category\": 2}",
        ],
    );
    seeds.add("prompts", b"{\"prompt\": \"\xff\"}");
}

/// Keys of a chat's request, and what they hold.
fn from_chats() -> Vec<(&'static str, Value)> {
    vec![
        ("response_format", json!({"type": "text"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("response_format", json!({"type": "text", "x": 1})),
        ("response_format", json!(1)),
        ("top_logprobs", json!(2)),
        ("logprobs", json!(1)),
        ("max_tokens", json!(3)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!("a")),
        ("n", json!(1000)),
        ("n", json!(0)),
        ("top_k", json!(-1)),
        ("top_k", json!(1.5)),
        ("stop", json!("a")),
        ("stop", json!([])),
        ("stop", json!([1])),
        ("stop", json!(["a", "b", "c", "d", "e"])),
        ("acceptance", json!("greedy")),
        ("acceptance", json!("other")),
        ("acceptance", json!(1)),
        ("stream_options", json!({"include_usage": true})),
        ("stream", json!("yes")),
        ("temperature", json!(-1)),
        ("temperature", json!(null)),
        ("top_p", json!(2)),
        ("seed", json!(-5)),
        ("tools", json!(1)),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("tool_choice", json!("required")),
        ("tool_choice", json!("none")),
        ("unknown", json!({})),
        ("messages", json!(1)),
        ("messages", json!([])),
        ("messages", json!([1])),
        ("messages", json!([{"role": 1}])),
        ("messages", json!([{"role": "user", "content": 1}])),
        ("messages", json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
        ("messages", json!([{"role": "user", "content": [1]}])),
        ("messages", json!([{"role": "user", "content": "a", "x": 1}])),
        ("messages", json!([{"role": "user", "content": "long words ".repeat(40)}])),
    ]
}

/// Keys of a completion's request, and what they hold.
fn of_completions() -> Vec<(&'static str, Value)> {
    vec![
        ("prompt", json!("")),
        ("prompt", json!(1)),
        ("prompt", json!([[]])),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([{}])),
        ("prompt", json!([1_000_000])),
        ("prompt", json!([-1, 1])),
        ("prompt", json!("long words ".repeat(40))),
        ("prompt", json!("w".repeat(60_000))),
        ("echo", json!(true)),
    ]
}

fn requests(seeds: &mut Seeds) {
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    let completion = json!({"model": "tiny", "prompt": "a"});
    for (form, whole, changes) in [("c", &chat, from_chats()), ("t", &completion, of_completions())] {
        for (key, value) in changes {
            let mut body = whole.clone();
            body[key] = value;
            seeds.all("serve_request", [format!("{form}{body}")]);
            seeds.all("serve_http", [format!("{form}{body}")]);
        }
        seeds.all(
            "serve_request",
            [format!("{form}[]"), format!("{form}{{"), format!("{form}{{\"model\": \"tiny\"}}"), form.to_owned()],
        );
    }
    let mut both = chat.clone();
    (both["max_tokens"], both["max_completion_tokens"]) = (json!(3), json!(4));
    seeds.add("serve_request", format!("c{both}"));
    let post = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer key\r\ncontent-type: application/json\r\n";
    seeds.all(
        "serve_http",
        [
            format!("{post}content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{{}}"),
            format!("{post}content-length: 200000\r\n\r\n{{}}"),
            format!("{post}transfer-encoding: chunked\r\n\r\nfffff\r\n{}", "x".repeat(400)),
            format!("{post}transfer-encoding: chunked\r\n\r\nzz\r\n"),
            "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer other\r\n\r\n".to_owned(),
            "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Basic key\r\n\r\n".to_owned(),
        ],
    );
}

/// What templates do, and mistakes in them.
const TEMPLATES: [&str; 18] = [
    "{{ [1, 2, 3] | slice(2) | list }}{{ [1, none] | select | list }}{{ [1, 2] | reject('odd') | list }}",
    "{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}{{ [' a '] | map('trim') | list }}",
    "{{ messages | map(attribute='content') | map('upper') | join(' ') }}{{ messages | select('mapping') | list | length }}",
    "{{ 'é' | tojson(ensure_ascii=true) }}{{ '\u{1f600}' | tojson(ensure_ascii=true) }}",
    "{{ strftime_now('%Q') }}",
    "{% raw %}{% endrawer %}{{ a }}{% endraw %}",
    "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(a=1) %}{{ [ns] }}",
    "{% set s = 'ab' * 400 %}{{ (s ~ s ~ s) | length }}{{ s.count('a') }}{{ s[3:9] }}{{ s == s ~ '' }}",
    "{{ 'a' | replace('a', 'b' * 100) | length }}{{ 'ab'.replace('a', 'c') }}{{ 'a-b'.split('-', 1) }}{{ ' a'.lstrip() }}{{ 'ab'.startswith('a') }}",
    "{{ raise_exception('no') }}",
    "{{ nothing.there }}",
    "{{ 1 +",
    "{% block a %}{% endblock %}",
    "{{ messages[0]['content'] | default('x') | e }}{{ dict(a=1) | items | list }}{{ 'abc' | list | sort | unique | list }}{{ [3, 1] | min }}",
    "{% macro m(x) %}{{ caller() }}{{ x }}{% endmacro %}{% call m(1) %}y{% endcall %}{% filter upper %}a{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}",
];

fn templates(seeds: &mut Seeds) {
    seeds.all("chat_template", TEMPLATES);
}

fn configs(seeds: &mut Seeds) {
    let whole: Value = serde_json::from_slice(&bytes("data/tiny/backbone/config.json")).expect("JSON");
    let with = |key: &str, value: Value| {
        let mut config = whole.clone();
        config[key] = value;
        config.to_string()
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5});
    seeds.all(
        "config",
        [
            with("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})),
            with("rope_scaling", yarn),
            with("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.0})),
            with("rope_scaling", json!({"factor": 2.0})),
            with("rope_scaling", json!({"rope_type": "xpos", "factor": 2.0})),
            with("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0})),
            with("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5})),
            with("rope_parameters", json!({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}})),
            with("partial_rotary_factor", json!(0.5)),
            with("partial_rotary_factor", json!(3.0)),
            with("num_hidden_layers", json!(1_000_000)),
            with("hidden_act", json!("gelu")),
            with("num_key_value_heads", json!(5)),
            with("rms_norm_eps", json!(-1)),
            with("vocab_size", json!(0)),
            with("eos_token_id", json!([1, 2])),
            with("model_type", json!("gpt2")),
            with("model_type", json!(null)),
            "[]".into(),
        ],
    );
}

fn tensors(seeds: &mut Seeds) {
    let states = |hidden: (&str, &[usize]), ids: (&str, &[usize]), mask: (&str, &[usize])| {
        header(&[("hidden_states", hidden.0, hidden.1), ("token_ids", ids.0, ids.1), ("loss_mask", mask.0, mask.1)])
    };
    for (hidden, ids, mask) in [
        (("F16", &[2, 3, 4][..]), ("I64", &[2][..]), ("I64", &[2][..])),
        (("BF16", &[2, 3, 4]), ("I64", &[2]), ("I32", &[2])),
        (("F64", &[2, 3, 4]), ("I64", &[2]), ("U8", &[2])),
        (("F32", &[2, 3, 4]), ("F32", &[2]), ("U8", &[2])),
        (("F32", &[2, 3, 4]), ("I64", &[2]), ("F32", &[2])),
        (("F32", &[2, 3, 4]), ("I64", &[2]), ("U8", &[3])),
        (("F32", &[2, 12]), ("I64", &[2]), ("U8", &[2])),
        (("F32", &[3, 3, 4]), ("I64", &[2]), ("U8", &[2])),
        (("F32", &[2, 3, 5]), ("I64", &[2]), ("U8", &[2])),
    ] {
        seeds.add("captured_states", states(hidden, ids, mask));
    }
    let whole = states(("F32", &[2, 3, 4]), ("I64", &[2]), ("BOOL", &[2]));
    let not_finite: Vec<u8> = [0x7f80_0000_u32; 24].iter().flat_map(|bits| bits.to_le_bytes()).collect();
    seeds.add("captured_states", [whole.as_bytes(), b"\0", &not_finite, &[1; 18]].concat());
    seeds.add("captured_states", [whole.as_bytes(), b"\0", &[0; 96], &[0xff; 18]].concat());
    seeds.add("captured_states", header(&[("hidden_states", "F32", &[2, 3, 4])]));
    seeds.all(
        "weights_index",
        [
            "{",
            "{\"weight_map\": 1}",
            "",
            "t{\"weight_map\": {\"a\": \"a.safetensors\"}}",
            "{\"weight_map\": {\"a\": \"a.safetensors\", \"b\": \"x.safetensors\"}}",
        ],
    );
    let safetensors = header(&[("a", "F32", &[2, 3])]);
    for (from, to) in [
        ("[0,24]", "[0,23]"),
        ("[0,24]", "[24,0]"),
        ("F32", "F99"),
        ("[2, 3]", "[2, 18446744073709551615]"),
        ("\"a\"", "\"\""),
    ] {
        seeds.add("safetensors", safetensors.replace(from, to));
    }
}

/// torch.save's files that are no archive as it is written, and weights that do not lie in their storage.
fn torch_files(seeds: &mut Seeds) {
    use std::io::{Cursor, Write};
    let archive = |order: &[u8], name: &str| {
        let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
        for (part, data) in [("data.pkl", &b"\x80\x02}."[..]), ("byteorder", order), ("data/0", &[0; 64])] {
            zip.start_file(format!("{name}/{part}"), options)
                .and_then(|()| Ok(zip.write_all(data)?))
                .expect("a zip in memory");
        }
        zip.finish().expect("a zip in memory").into_inner()
    };
    let mut compressed = archive(b"little", "a");
    for at in 0..compressed.len() - 12 {
        match &compressed[at..at + 4] {
            b"PK\x03\x04" => compressed[at + 8] = 8,
            b"PK\x01\x02" => compressed[at + 10] = 8,
            _ => {}
        }
    }
    for file in [archive(b"big", "a"), archive(b"little", "a/b"), compressed] {
        seeds.add("torch_file", [b"r", &file[..]].concat());
    }
    let tensor = |offset: u8, sizes: [u8; 2], strides: [u8; 2]| {
        let pair = |numbers: [u8; 2]| [b"(K", &numbers[..1], b"K", &numbers[1..], b"t"].concat();
        let storage = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK@tQK";
        [
            &b"z\x80\x02}X\x01\0\0\0a"[..],
            storage,
            &[offset],
            &pair(sizes),
            &pair(strides),
            b"\x89ccollections\nOrderedDict\n)RtRs.",
        ]
        .concat()
    };
    seeds.all(
        "torch_file",
        [
            tensor(0, [2, 3], [3, 1]),
            tensor(60, [2, 3], [3, 1]),
            tensor(0, [2, 3], [1, 2]),
            tensor(0, [0, 3], [3, 1]),
            tensor(0, [9, 9], [200, 1]),
        ],
    );
    seeds.all("torch_file", [&b"r\x80\x02\x8a\n\0"[..], b"r", b"rPK\x03\x04"]);
}

type Tensor = (&'static str, &'static str, &'static [usize]);

const OWN_W2: [Tensor; 2] = [("0.1.weight", "F32", &[16, 8]), ("1.1.weight", "F32", &[16, 8])];
const TRUNCATED: [Tensor; 2] = [("0.1.weight", "F32", &[4, 8]), ("1.1.weight", "F32", &[4, 8])];

/// A header of two heads' ResBlocks and of these tensors.
fn two_heads(prefix: &str, more: &[Tensor]) -> String {
    let blocks: [(&str, &[usize]); 4] = [
        ("0.0.linear.weight", &[8, 8]),
        ("0.0.linear.bias", &[8]),
        ("1.0.linear.weight", &[8, 8]),
        ("1.0.linear.bias", &[8]),
    ];
    let names = blocks.map(|(name, _)| format!("{prefix}{name}"));
    let own = names.iter().zip(blocks).map(|(name, (_, shape))| (name.as_str(), "F32", shape));
    header(&own.chain(more.iter().copied()).collect::<Vec<_>>())
}

fn heads(seeds: &mut Seeds) {
    let mut all = vec![(json!({}), two_heads("", &OWN_W2).into_bytes())];
    all.extend(token_maps());
    all.extend(of_vllm());
    all.push((json!({}), two_heads("medusa_heads.", &[]).into_bytes()));
    all.push((json!({}), two_heads("", &[&OWN_W2[..], &[("w2.weight", "F32", &[16, 8])]].concat()).into_bytes()));
    all.push((json!({}), two_heads("", &OWN_W2).replace("[8, 8]", "[4, 16]").into_bytes()));
    for (hidden_size, rows) in [(4, 16), (8, 9)] {
        let one = [
            ("0.0.linear.weight", "F32", &[hidden_size, hidden_size][..]),
            ("0.0.linear.bias", "F32", &[hidden_size]),
            ("0.1.weight", "F32", &[rows, hidden_size]),
        ];
        all.push((json!({}), header(&one).into_bytes()));
    }
    all.push((json!({}), two_heads("x.", &OWN_W2).into_bytes()));
    all.push((json!({"hidden_state_offset": 1}), two_heads("", &OWN_W2).into_bytes()));
    for file in ["hydra", "hydra++", "hydra_w2_bias", "hydra_truncated", "hydra_shared_w2", "hydra_low_rank"] {
        let path = format!("tests/fixtures/hydra/{file}.safetensors");
        if root(&path).is_file() {
            all.push((json!({"hidden_state_offset": 1}), unprefixed(&bytes(&path))));
        }
    }
    for (config, tensors) in all.iter().filter(|(_, tensors)| tensors.len() < 20_000) {
        seeds.add("heads", [config.to_string().as_bytes(), b"\0", tensors].concat());
    }
}

/// Heads over a part of the vocabulary.
fn token_maps() -> Vec<(Value, Vec<u8>)> {
    let ids = |ids: [i64; 4]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let truncated =
        |rows: &'static [usize]| two_heads("", &[&TRUNCATED[..], &[("token_map", "I64", rows)]].concat()).into_bytes();
    let mut all: Vec<(Value, Vec<u8>)> = [&[0][..], &[5]].map(|rows| (json!({}), truncated(rows))).into();
    for token_map in [[1, 2, 3, 4], [1, 1, 2, 3], [-1, 0, 1, 2], [1, 2, 3, 99]] {
        let data = [truncated(&[4]), b"\0".to_vec(), vec![0; 4 * (2 * 72 + 2 * 32)], ids(token_map)].concat();
        all.push((json!({"medusa_num_heads": 2}), data));
    }
    all
}

/// Heads with vLLM's names.
fn of_vllm() -> Vec<(Value, Vec<u8>)> {
    let vllm = |name: &str| name.replace("0.0.linear", "blocks.0.layers.0").replace("1.0.linear", "blocks.1.layers.0");
    let lm_heads: [Tensor; 2] = [("lm_heads.0.weight", "F32", &[16, 8]), ("lm_heads.1.weight", "F32", &[16, 8])];
    let shared: [Tensor; 1] = [("lm_head.weight", "F32", &[16, 8])];
    let of_other_size: [Tensor; 1] = [("lm_head.weight", "F32", &[16, 9])];
    let heads = [
        (json!({}), &lm_heads[..]),
        (json!({"original_lm_head": true}), &lm_heads),
        (json!({"original_lm_head": true}), &shared),
        (json!({"shared_w2": true}), &shared),
        (json!({"logit_scale": 2.0}), &lm_heads),
        (json!({}), &of_other_size),
    ];
    heads.map(|(config, more)| (config, vllm(&two_heads("", more)).into_bytes())).into()
}

fn hub(seeds: &mut Seeds) {
    let commit = "0".repeat(40);
    let head = format!("200\n\n{{\"sha\": \"{commit}\"}}");
    let file = |path: &str| json!({"type": "file", "path": path, "size": 3, "oid": "1".repeat(40)});
    let list =
        |paths: &[&str]| format!("200\n\n{}", Value::from(paths.iter().map(|path| file(path)).collect::<Vec<_>>()));
    for form in ["d", "t", "c", "h", "m", "s", "v", "r"] {
        for paths in [
            &["README.md"][..],
            &["en/train.jsonl", "fr/train.jsonl"],
            &["a/split.jsonl", "b/split.jsonl", "data/c/other-split.parquet"],
            &["split-0.jsonl", "a/split.jsonl"],
            &["config/split.jsonl", "config/train-0.jsonl", "config/validation.jsonl"],
            &["validation.jsonl", "test.csv"],
            &["data/train-0.parquet", "data/val-0.parquet"],
            &["model.gguf", "config.json"],
            &["config.json", "pytorch_model.bin", "tokenizer.model"],
            &["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
            &["medusa_lm_head.pt", "config.json"],
        ] {
            seeds.add("hub", format!("{form}{head}\0{}", list(paths)));
        }
    }
    let next =
        |to: &str| format!("m{head}\0200\nLink: <{to}>; rel=\"next\"\n\n[]\0200\nLink: <{to}>; rel=\"next\"\n\n[]");
    seeds.all(
        "hub",
        [
            next("http://elsewhere.test/a"),
            next("/same?cursor=1"),
            next("::"),
            "m412\n\n".to_owned(),
            "m401\nX-Error-Code: RepoNotFound\n\n".to_owned(),
            "m418\n\n{\"error\": \"a teapot\"}".to_owned(),
            "m200\n\n{\"sha\": \"../..\"}".to_owned(),
            "m200\n\n[]".to_owned(),
            format!("m{head}\0200\n\n{{}}"),
            format!("m{}", "302\nLocation: /a\n\n\0".repeat(12)),
        ],
    );
}

fn folders(seeds: &mut Seeds) {
    let distill = |share: &str| {
        json!({"shard_format": 2, "program_version": "0.1.0", "backbone": "tiny", "prompts": "p.jsonl", "prompts_sha256": "ab",
        "conversations": 4, "too_long": 0, "share": share, "conversations_per_file": 256, "temperature": 0.7, "top_p": 1.0,
        "max_new_tokens": 8, "self_talk": false, "seed": 1})
    };
    let finished = |id: usize| {
        json!({"id": id, "index": id, "prompt_id": null, "category": null, "conversations": [{"from": "human", "value": "hi"}],
        "input_ids": [1, 2], "labels": [-100, 2], "finish_reason": "eos"})
    };
    let first = distill("1/1").to_string();
    seeds.all(
        "distill_folder",
        [
            format!("{first}\0{}\n\x000 1 2 3", finished(0)),
            format!("{first}\0\x000 1 1"),
            format!("{}\0{}\n\x000\0{}", distill("1/2"), finished(2), distill("2/2")),
            format!("{}\0\x000\0{}", distill("1/2"), distill("2/2").to_string().replace("0.7", "0.8")),
            format!("{}\0\0\0{{}}", distill("1/2")),
        ],
    );
    for share in ["1/1", "1/2", "3/2", "x"] {
        seeds.add("distill_folder", format!("{}\0{}\n{}\n", distill(share), finished(0), finished(1)));
    }
}
