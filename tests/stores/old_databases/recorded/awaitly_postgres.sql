-- The table of runs as awaitly creates it.
CREATE TABLE perdure_runs (
    id text PRIMARY KEY, snapshot jsonb NOT NULL, updated_at timestamptz DEFAULT now()
);
CREATE INDEX perdure_runs_updated_at_idx ON perdure_runs (updated_at DESC);
