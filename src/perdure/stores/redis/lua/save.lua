-- KEYS: the run. ARGV: workflow, rest as JSON, snapshot.
local shard, id = shard_and_id(KEYS[1])
local workflow = workflow_of(ARGV[1])
look(shard, id, workflow)
lay(shard, id, workflow, tick(shard), nil, ARGV[3], cjson.decode(ARGV[2]))
