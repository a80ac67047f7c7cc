{# Whether slot `s` sees the thread's key, which is at `position`; with a bias, also the term of its
   logit. #}
{% if many %}
            let lo{{s}} = positions[spans + 2u * ({{s}}u / params.group_heads)];
            let hi{{s}} = positions[spans + 2u * ({{s}}u / params.group_heads) + 1u];
{% endif %}
{% if bias %}
            let term{{s}} = bias_term(bias_row{{s}}, position);
            let vis{{s}} = inside && lo{{s}} <= position && position < hi{{s}} && shows(term{{s}});
{% else %}
            let vis{{s}} = inside && lo{{s}} <= position && position < hi{{s}};
{% endif %}
