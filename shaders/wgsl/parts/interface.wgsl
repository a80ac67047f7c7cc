{# The head of every kernel: what it enables, its parameters and its bindings. Both lists come from
   Rust, which fills the same struct and binds the same buffers. #}
{% if needs_subgroups and dialect == "tint" %}
enable subgroups;

{% endif %}
{% if needs_matrices %}
enable f16;
enable wgpu_cooperative_matrix;

{% endif %}
// {{name}}
struct {{uniform.name}} {
{% for field in uniform.fields %}
    {{field.name}}: {{field.type}},
{% endfor %}
}
{% for binding in bindings %}
@group(0) @binding({{loop.index0}}) var{{binding.space}} {{binding.name}}: {{binding.type}};
{% endfor %}

