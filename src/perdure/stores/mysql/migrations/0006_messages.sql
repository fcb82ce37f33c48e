UPDATE {runs} AS run
JOIN (
    SELECT run AS id, COUNT(*) AS messages FROM {inbox} WHERE consumed = 0 GROUP BY run
) AS counted ON counted.id = run.id
SET run.messages = counted.messages
