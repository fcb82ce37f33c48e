-- KEYS: the run. ARGV: workflow, rest as JSON, snapshot.
local shard, id = shard_and_id(KEYS[1])
look(shard, id, workflow_of(ARGV[1]))
local header = {epoch = tick(shard), workflow = workflow_of(ARGV[1])}
lay(shard, id, header, ARGV[3], cjson.decode(ARGV[2]))
