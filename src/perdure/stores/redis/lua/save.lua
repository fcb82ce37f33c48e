-- Replaces or creates a run, in no queue. Its new epoch fences out the previous owner.
-- KEYS: the run. ARGV: workflow; rest, as JSON that a NUL and a summary may follow; snapshot.
local shard, id = shard_and_id(KEYS[1])
local old = read_header(KEYS[1])
local base = {
    workflow = ARGV[1], queue = '', version = '0', tags = '[]',
    -- The time of creation of a run of the first layout is unknown, and stays unknown.
    created = not old and now_text or old and old.created or nil,
}
local new = header_at_rest(KEYS[1], base, decode(ARGV[2]))
new.snapshot = ARGV[3]
settle(shard, id, old, new, {})
