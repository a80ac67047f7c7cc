{# The head of the entry point of kernels between elements and 8-bit codes: the chunks of 8 elements
   that share the scales of this thread are begin, begin + stride, …, `steps` of them. #}
{% include "parts/thread.wgsl" %}
    if (index >= params.count) { return; }
    let group = params.first + index;
{% if scales == "channels" %}
    let part = group / params.lanes;
    let parts = (params.tokens + params.together - 1u) / params.together;
    let token = (part % parts) * params.together;
    let steps = min(params.together, params.tokens - token);
    let stride = params.lanes;
    let begin = ((part / parts) * params.tokens + token) * params.lanes + group % params.lanes;
{% else %}
    let steps = params.lanes;
    let stride = 1u;
    let begin = group * params.lanes;
{% endif %}
