{# The keys first..end of run number `run` that belong to the split. #}
        let first = max(work[params.runs_at + 2u * run], split_begin);
        let end = min(work[params.runs_at + 2u * run + 1u], split_end);
