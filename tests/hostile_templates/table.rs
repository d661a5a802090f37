//! Templates that would take memory, time or the stack without end, each with a name for reports.

/// Those that take a second or more where nothing is optimised.
pub(crate) const SLOW: [&str; 4] =
    ["depth_doubling_macro", "growth_many_short_texts", "growth_doubled_title", "growth_loop_over_text"];

/// A loop around `body`, as often as a template may.
fn looped(body: &str) -> String {
    format!("{{% for i in range(100000) %}}{{% for j in range(100000) %}}{body}{{% endfor %}}{{% endfor %}}")
}

/// `body` with a text `s` of 2 MiB and a namespace `ns`.
fn with_text(body: &str) -> String {
    format!("{{% set ns = namespace(s='ab') %}}{{% set s = 'ab' * 1000000 %}}{body}")
}

fn repeated(opening: &str, times: usize, closing: &str) -> String {
    format!("{{{{ {}a{} }}}}", opening.repeat(times), closing.repeat(times))
}

/// Depth of what is parsed and compiled.
fn deep_source() -> Vec<(&'static str, String)> {
    vec![
        ("elif", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(7000))),
        ("elif_many", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(60_000))),
        ("plus", repeated("1+", 20_000, "")),
        ("minus", repeated("-", 20_000, "")),
        ("not", repeated("not ", 20_000, "")),
        ("and", repeated("a and ", 20_000, "")),
        ("or", repeated("a or ", 20_000, "")),
        ("tilde", repeated("'a' ~ ", 20_000, "")),
        ("power", repeated("2**", 20_000, "")),
        ("equal", repeated("a == ", 20_000, "")),
        ("less", repeated("1 < ", 20_000, "")),
        ("in", repeated("a in ", 20_000, "")),
        ("ternary", repeated("a if a else ", 20_000, "")),
        ("is_defined", format!("{{{{ a{} }}}}", " is defined".repeat(20_000))),
        ("dots", format!("{{{{ a{} }}}}", ".b".repeat(40_000))),
        ("filters", format!("{{{{ a{} }}}}", "|upper".repeat(40_000))),
        ("items", format!("{{{{ a{} }}}}", "[0]".repeat(40_000))),
        ("slices", format!("{{{{ a{} }}}}", "[1:]".repeat(40_000))),
        ("calls", format!("{{{{ a{} }}}}", "()".repeat(40_000))),
        ("lists", repeated("[", 40_000, "]")),
        ("tuples", repeated("(1,", 40_000, ")")),
        ("parentheses", repeated("(", 40_000, ")")),
        ("dicts", repeated("{'a':", 40_000, "}")),
        ("arguments", repeated("f(", 40_000, ")")),
        ("blocks_if", format!("{}{}", "{% if 1 %}".repeat(20_000), "{% endif %}".repeat(20_000))),
        ("blocks_for", format!("{}{}", "{% for a in b %}".repeat(20_000), "{% endfor %}".repeat(20_000))),
        ("blocks_set", format!("{}x{}", "{% set a %}".repeat(20_000), "{% endset %}".repeat(20_000))),
        ("blocks_with", format!("{}x{}", "{% with %}".repeat(20_000), "{% endwith %}".repeat(20_000))),
        ("blocks_filter", format!("{}x{}", "{% filter upper %}".repeat(20_000), "{% endfilter %}".repeat(20_000))),
        ("blocks_open", "{% if 1 %}".repeat(20_000)),
        ("blocks_macro", format!("{}x{}", "{% macro a() %}".repeat(20_000), "{% endmacro %}".repeat(20_000))),
        ("else_if", format!("{}{}", "{% if 0 %}{% else %}".repeat(20_000), "{% endif %}".repeat(20_000))),
        ("set_dots", format!("{{% set a{} = 1 %}}", ".b".repeat(40_000))),
        ("for_in_list", format!("{{% for a in {}1{} %}}{{% endfor %}}", "[".repeat(20_000), "]".repeat(20_000))),
        ("raw", format!("{{% raw %}}{}", "{%".repeat(500_000))),
        ("open_expressions", "{{".repeat(400_000)),
        ("open_comments", "{#".repeat(400_000)),
        ("open_tags", "{%".repeat(400_000)),
        ("long", "x".repeat(3_000_000)),
        ("long_expressions", "{{ a }}".repeat(400_000)),
    ]
}

/// Depth of what is made.
fn deep_values() -> Vec<(&'static str, String)> {
    let grown = |step: &str, shown: &str| {
        format!("{{% set ns = namespace(a=1) %}}{}{shown}", looped(&format!("{{% set ns.a = {step} %}}")))
    };
    vec![
        ("cycle", "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".to_owned()),
        ("cycle_of_two", "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a }}".to_owned()),
        ("cycle_in_list", "{% set a = namespace() %}{% set a.b = [a] %}{{ a }}".to_owned()),
        ("cycle_in_dict", "{% set a = namespace() %}{% set a.b = dict(c=a) %}{{ a ~ '' }}".to_owned()),
        ("cycle_json", "{% set a = namespace() %}{% set a.b = {'c': a} %}{{ a | tojson }}".to_owned()),
        ("nested_list", grown("[ns.a]", "{{ ns.a }}")),
        ("nested_tuple", grown("(ns.a,)", "{{ ns.a }}")),
        ("nested_dict", grown("{'a': ns.a}", "{{ ns.a }}")),
        ("nested_dict_call", grown("dict(a=ns.a)", "")),
        (
            "renamed_range",
            "{% set r = range(100000) %}{% set range = dict %}{% set ns = namespace(a=1) %}{% for i in r %}{% set ns.a = range(a=ns.a) %}{% endfor %}"
                .to_owned(),
        ),
        ("nested_namespace", grown("namespace(a=ns.a)", "")),
        ("nested_batch", grown("([ns.a] | batch(1) | list)", "")),
        ("nested_slice", grown("([1] + [ns.a])[0:]", "")),
        ("nested_items", grown("({'a': ns.a}.items() | list)", "")),
        ("nested_reverse", grown("[[ns.a] | reverse]", "")),
        ("nested_group", grown("([{'k': 1, 'v': ns.a}] | groupby('k'))", "")),
        ("nested_map", grown("([{'v': [ns.a]}] | map(attribute='v') | list)", "")),
        ("wide_list", grown("[ns.a, ns.a]", "{{ ns.a }}")),
        ("wide_dict", grown("{'a': ns.a, 'b': ns.a}", "{{ ns.a == ns.a }}")),
        ("wide_tuple", grown("(ns.a, ns.a, ns.a)", "{{ ns.a ~ ns.a }}")),
        ("recursive_macro", "{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}".to_owned()),
        ("recursive_macros", "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}".to_owned()),
        ("doubling_macro", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}x{% endmacro %}{{ f(60) }}".to_owned()),
        ("doubling_argument", "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}".to_owned()),
        ("recursive_loop", "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}".to_owned()),
        ("recursive_caller", "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}".to_owned()),
        ("recursive_block", "{% block a %}{{ self.a() }}{% endblock %}".to_owned()),
        ("include_itself", "{% include 'chat_template' %}".to_owned()),
    ]
}

/// Width of one result.
fn wide() -> Vec<(&'static str, String)> {
    let plain = [
        ("json_indent", "{{ {'a': 1} | tojson(indent=1000000000000) }}"),
        ("indent", "{{ 'a\nb' | indent(10000000000) }}"),
        ("batch", "{{ [1] | batch(1000000000000, 'x') }}"),
        ("slice", "{{ [1] | slice(1000000000000, 'x') }}"),
        ("format_printf", "{{ '%1000000000d' | format(1) }}"),
        ("format_star", "{{ '%*d' | format(1000000000, 1) }}"),
        ("format_precision", "{{ '%.1000000000f' | format(1.5) }}"),
        ("format_braces", "{{ '{:>1000000000}'.format(1) }}"),
        ("format_nested", "{{ '{:>{}}'.format(1, 1000000000) }}"),
        ("format_fields", "{{ ('{0:>999}' * 100000).format(1) }}"),
        ("text_times", "{{ 'a' * 10000000000 }}"),
        ("text_times_most", "{{ ('a' * 100000000) ~ ('b' * 100000000) }}"),
        ("text_times_variable", "{% set n = 100000000 %}{{ ('a' * n) ~ ('b' * n) }}"),
        ("list_times", "{{ ([1] * 10000000000) | length }}"),
        ("tuple_times", "{{ ((1, 2) * 100000000) | length }}"),
        ("list_times_shown", "{{ [1, 2] * 50000000 }}"),
        ("range", "{{ range(1000000000000) | list | length }}"),
        ("centre", "{{ 'a' | center(1000000000) }}"),
        ("power", "{{ 10 ** 1000000000 }}"),
    ];
    plain.map(|(name, template)| (name, template.to_owned())).into()
}

/// Growth, step by step.
fn growing() -> Vec<(&'static str, String)> {
    let doubled = |step: &str| {
        format!(
            "{{% set ns = namespace(s='ab', l=[1, 2]) %}}{{% for i in range(60) %}}{{% set ns.s = {step} %}}{{% endfor %}}{{{{ ns.s | length }}}}"
        )
    };
    vec![
        ("doubled_plus", doubled("ns.s + ns.s")),
        ("doubled_tilde", doubled("ns.s ~ ns.s")),
        ("doubled_times", doubled("ns.s * 2")),
        ("doubled_replace", doubled("ns.s | replace('a', 'aa')")),
        ("doubled_replace_method", doubled("ns.s.replace('a', 'aa')")),
        ("doubled_replace_empty", doubled("ns.s | replace('', ns.s)")),
        ("doubled_join", doubled("[ns.s, ns.s] | join")),
        ("doubled_join_method", doubled("ns.s.join([ns.s, ns.s])")),
        ("doubled_format", doubled("'%s%s' | format(ns.s, ns.s)")),
        ("doubled_format_method", doubled("'{0}{0}'.format(ns.s)")),
        ("doubled_json", doubled("[ns.s, ns.s] | tojson")),
        ("doubled_shown", doubled("([ns.s, ns.s] | string)")),
        ("doubled_map", doubled("([ns.s] * 2) | map('upper') | join")),
        ("doubled_list", doubled("(ns.s if i else [1]) + (ns.s if i else [2])")),
        ("doubled_escape", doubled("(ns.s ~ ns.s ~ '<') | escape | string")),
        ("doubled_title", doubled("(ns.s ~ ns.s) | title")),
        ("doubled_capture", "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}".to_owned()),
        ("doubled_filter_block", "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set t %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = t %}{% endfor %}".to_owned()),
        ("statements", format!("{{% set s = 'ab' %}}{}{{{{ s }}}}", "{% set s = s ~ s %}".repeat(60))),
        ("repeated_replace", format!("{{{{ 'ab'{} }}}}", "|replace('a','aa')".repeat(60))),
        ("many_texts", with_text(&format!("{{% set ns.l = [] %}}{}", looped("{% set ns.l = ns.l + [s ~ i] %}")))),
        ("many_long_texts", with_text(&(0..400).map(|i| format!("{{% set a{i} = s ~ {i} %}}")).collect::<String>())),
        ("many_short_texts", looped("{% set x = 'abcdefghijklmnopqrstuvwxyz' ~ i ~ j %}")),
        ("output", with_text(&looped("{{ s }}"))),
        ("output_raw", looped(&"x".repeat(100_000))),
        ("output_raw_captured", format!("{{% set x %}}{}{{% endset %}}", looped(&"x".repeat(100_000)))),
        ("split", with_text("{% set l = s.split('a') %}{% set m = s | list %}{{ l | length }}")),
        ("loop_over_text", with_text(&looped("{% for c in s %}{% endfor %}"))),
        ("macros", looped("{% macro m(a) %}{{ a }}{% endmacro %}")),
    ]
}

/// Time.
fn slow() -> Vec<(&'static str, String)> {
    vec![
        ("endless", looped("")),
        ("int_of_long_text", with_text(&looped("{% if s | int %}{% endif %}"))),
        ("json_of_list", format!("{{% set l = [1] * 40000 %}}{}", looped("{% set n = l | tojson | length %}"))),
        ("endless_sums", looped("{% set x = i + j * 2 - 1 %}")),
        ("compared", with_text(&format!("{{% set t = s ~ '' %}}{}", looped("{% if s == t %}{% endif %}")))),
        (
            "compared_lists",
            with_text(&format!("{{% set l = [s] %}}{{% set t = [s ~ ''] %}}{}", looped("{% if l == t %}{% endif %}"))),
        ),
        (
            "compared_straight",
            with_text(&format!("{{% set t = s ~ '' %}}{}", "{% if s == t %}{% endif %}".repeat(30_000))),
        ),
        ("searched", with_text(&looped("{% if 'ba' ~ 'c' in s %}{% endif %}"))),
        ("counted", with_text(&looped("{% set n = s | length %}"))),
        ("counted_method", with_text(&looped("{% set n = s.count('ab') %}"))),
        ("last_letter", with_text(&looped("{% set n = s[-1] %}"))),
        ("tail", with_text(&looped("{% set n = s[1999999:] %}"))),
        ("trimmed", with_text(&looped("{% set n = s | trim('ab') %}"))),
        ("trimmed_by_all", with_text("{% set n = s | trim(s) %}{% set n = s.strip(s) %}")),
        ("chosen", with_text("{% set n = range(100000) | map('string') | select('in', s) | list %}")),
        ("sorted_texts", with_text(&format!("{{% set t = s ~ 'a' %}}{}", looped("{% set n = [s, t] | sort %}")))),
        (
            "keys",
            with_text(&format!(
                "{{% set d = {{'a': 1}} %}}{}",
                looped("{% if s in d or d[s] or d.get(s) %}{% endif %}")
            )),
        ),
        ("tested", with_text(&looped("{% if s is lower %}{% endif %}"))),
        ("sorted", with_text(&looped("{% set l = range(100000) | sort %}"))),
    ]
}

/// All of them, by the names `group_name`.
pub(crate) fn templates() -> Vec<(String, String)> {
    let groups = [
        ("source", deep_source()),
        ("depth", deep_values()),
        ("width", wide()),
        ("growth", growing()),
        ("time", slow()),
    ];
    let named =
        groups.into_iter().flat_map(|(group, templates)| templates.into_iter().map(move |template| (group, template)));
    named.map(|(group, (name, template))| (format!("{group}_{name}"), template)).collect()
}
