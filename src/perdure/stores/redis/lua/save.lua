-- Replaces or creates a run. Its new epoch fences out the previous owner.
-- KEYS: the run. ARGV: workflow, rest as JSON, snapshot.
local shard, id = shard_and_id(KEYS[1])
local workflow = workflow_of(ARGV[1])
require_keys(shard, id, workflow)
settle(shard, id, workflow, next_number(shard), nil, ARGV[3], cjson.decode(ARGV[2]))
