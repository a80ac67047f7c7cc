{# load_{tensor}(at, chunk): a chunk of 4 elements of the row that starts at unit `at`; zero beyond
   the head. Kernels read heads 8 chunks at a time. #}
{% set beyond = chunks % 8 != 0 %}
fn load_{{tensor}}(at: u32, chunk: u32) -> vec4<f32> {
{% set inside = "min(chunk, " ~ (chunks - 1) ~ "u)" if beyond else "chunk" %}
{% if unit_chunks == 1 %}
    let value = chunk_0({{tensor}}[at + {{inside}}]);
{% else %}
    let unit = {{tensor}}[at + ({{inside}} >> 1u)];
    let value = select(chunk_0(unit), chunk_1(unit), (chunk & 1u) == 1u);
{% endif %}
{% if beyond %}
    return select(vec4<f32>(), value, chunk < {{chunks}}u);
{% else %}
    return value;
{% endif %}
}

