-- Everything of RunGuard in one schema. The name "runguard." is replaced by the schema that the store was given.
-- Locks are taken in one order everywhere: the row of a hold, then accounts by ascending key. Keys are compared byte by byte.
-- Names beyond what an index takes come shortened, with the whole name in a column of its own (NULL for the others).
-- Amounts end at 2^62 - 1, limits at 2^62 (no limit): no sum below leaves a bigint. A domain checks them: it costs a tenth of a table's CHECK.

CREATE DOMAIN runguard.amount AS bigint CHECK (VALUE >= 0);

CREATE TABLE runguard.accounts (
  key text COLLATE "C" PRIMARY KEY, scope text COLLATE "C" NOT NULL, "window" text, ends float8, long_key text, long_scope text,
  cap_usd runguard.amount NOT NULL, cap_tokens runguard.amount NOT NULL, cap_calls runguard.amount NOT NULL,
  spent_usd runguard.amount NOT NULL DEFAULT 0, spent_tokens runguard.amount NOT NULL DEFAULT 0, spent_calls runguard.amount NOT NULL DEFAULT 0,
  held_usd runguard.amount NOT NULL DEFAULT 0, held_tokens runguard.amount NOT NULL DEFAULT 0, held_calls runguard.amount NOT NULL DEFAULT 0,
  granted_usd runguard.amount NOT NULL DEFAULT 0, granted_tokens runguard.amount NOT NULL DEFAULT 0, granted_calls runguard.amount NOT NULL DEFAULT 0,
  overrun_usd runguard.amount NOT NULL DEFAULT 0, overrun_tokens runguard.amount NOT NULL DEFAULT 0, overrun_calls runguard.amount NOT NULL DEFAULT 0,
  expired_usd runguard.amount NOT NULL DEFAULT 0, expired_tokens runguard.amount NOT NULL DEFAULT 0, expired_calls runguard.amount NOT NULL DEFAULT 0,
  closed boolean NOT NULL DEFAULT false, updated float8 NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX accounts_scope ON runguard.accounts (scope);

-- What was held, and what was paid: NULL while nothing is booked.
CREATE TABLE runguard.holds (
  id text COLLATE "C" PRIMARY KEY, keys text[] NOT NULL, state text NOT NULL, expires float8 NOT NULL, updated float8 NOT NULL,
  usd runguard.amount NOT NULL, tokens runguard.amount NOT NULL, calls runguard.amount NOT NULL,
  paid_usd runguard.amount, paid_tokens runguard.amount, paid_calls runguard.amount
) WITH (fillfactor = 70);
CREATE INDEX holds_open ON runguard.holds (expires) WHERE state = 'open';

CREATE TABLE runguard.marks (
  key text COLLATE "C", mark text COLLATE "C", percent float8 NOT NULL, amounts text NOT NULL, long_mark text, PRIMARY KEY (key, mark)
);
CREATE TABLE runguard.documents (name text COLLATE "C" PRIMARY KEY, version bigint NOT NULL, text text NOT NULL);
CREATE TABLE runguard.claims (key text COLLATE "C" PRIMARY KEY, state text NOT NULL, expires float8 NOT NULL);
CREATE TABLE runguard.records (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at float8 NOT NULL, kind text COLLATE "C" NOT NULL, ref text NOT NULL, text text NOT NULL
);
CREATE INDEX records_kind ON runguard.records (kind, seq);
CREATE INDEX records_about ON runguard.records (hashtextextended(ref, 0), kind, seq); -- a hash: a ref may be longer than what an index takes
CREATE TABLE runguard.runs (id text COLLATE "C" PRIMARY KEY, worker text NOT NULL, beat float8 NOT NULL, ended boolean NOT NULL, text text NOT NULL, long_id text);
CREATE INDEX runs_alive ON runguard.runs (beat) WHERE NOT ended;

CREATE FUNCTION runguard.clock() RETURNS float8 LANGUAGE sql VOLATILE AS $$ SELECT date_part('epoch', clock_timestamp()) $$;

-- One amount more, or less: it stops at both ends of the range, because what happened is never refused.
CREATE FUNCTION runguard.plus(amount bigint, more bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
AS 'SELECT greatest(0, least(amount, 4611686018427387903 - more) + more)';

-- The overrun after a call that billed so much more than it held, with so much due beyond the limit.
CREATE FUNCTION runguard.beyond(more bigint, due bigint, overrun bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
AS 'SELECT CASE WHEN more > 0 AND due > 0 THEN greatest(overrun, least(due, runguard.plus(overrun, more))) ELSE overrun END';

-- An account as a line names it: made if new, with the caps in force now.
-- Lines come as arrays: all keys sorted, then all scopes, windows, long keys, long scopes; beginnings, then ends; three caps for each.
CREATE FUNCTION runguard.touch(p_names text[], p_times float8[], p_caps bigint[], i int, p_now float8) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  n int := cardinality(p_names) / 5;
BEGIN
  INSERT INTO runguard.accounts AS a (key, scope, "window", long_key, long_scope, ends, cap_usd, cap_tokens, cap_calls, updated)
  VALUES (p_names[i], p_names[n + i], p_names[2 * n + i], p_names[3 * n + i], p_names[4 * n + i], p_times[n + i],
    p_caps[3 * i - 2], p_caps[3 * i - 1], p_caps[3 * i], p_now)
  ON CONFLICT (key) DO UPDATE SET cap_usd = excluded.cap_usd, cap_tokens = excluded.cap_tokens, cap_calls = excluded.cap_calls;
END $$;

-- An account as it goes to the client. A single text is cheaper on both sides than two dozen columns.
CREATE FUNCTION runguard.shown(a runguard.accounts) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT json_build_array(
    coalesce(a.long_key, a.key), coalesce(a.long_scope, a.scope), a."window", a.ends, a.cap_usd, a.cap_tokens, a.cap_calls, a.spent_usd, a.spent_tokens, a.spent_calls, a.held_usd, a.held_tokens,
    a.held_calls, a.granted_usd, a.granted_tokens, a.granted_calls, a.overrun_usd, a.overrun_tokens, a.overrun_calls, a.expired_usd, a.expired_tokens,
    a.expired_calls, a.closed)::text
$$;

-- An answer: whether it is yes, whether a period was not the current one, the clock, the control document's version, whether holds are overdue, accounts.
CREATE FUNCTION runguard.answer(ok boolean, stale boolean, clock float8, control bigint, late boolean, accounts text) RETURNS text LANGUAGE sql STABLE
AS $$ SELECT '[' || ok || ',' || stale || ',' || clock || ',' || coalesce(control, 0) || ',' || coalesce(late, false) || ',[' || coalesce(accounts, '') || ']]' $$;

CREATE FUNCTION runguard.balances(p_keys text[]) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT string_agg(runguard.shown(a), ',' ORDER BY key) FROM runguard.accounts AS a WHERE key = ANY (p_keys)
$$;

CREATE FUNCTION runguard.control() RETURNS bigint LANGUAGE sql STABLE AS $$ SELECT version FROM runguard.documents WHERE name = 'control' $$;

-- Charge a batch of holds that nobody settled in time and nobody works on at this moment; how many there were.
CREATE FUNCTION runguard.expire() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := runguard.clock();
  v_ids text[];
BEGIN
  SELECT array_agg(id) INTO v_ids FROM (
    SELECT id FROM runguard.holds WHERE state = 'open' AND expires <= v_now ORDER BY expires LIMIT 64 FOR UPDATE SKIP LOCKED
  ) AS late;
  IF v_ids IS NULL THEN
    RETURN 0;
  END IF;
  PERFORM 1 FROM runguard.accounts WHERE key = ANY (ARRAY(SELECT unnest(keys) FROM runguard.holds WHERE id = ANY (v_ids))) ORDER BY key FOR UPDATE;
  UPDATE runguard.accounts AS a SET
    held_usd = runguard.plus(held_usd, -usd), held_tokens = runguard.plus(held_tokens, -tokens), held_calls = runguard.plus(held_calls, -calls),
    spent_usd = runguard.plus(spent_usd, usd), spent_tokens = runguard.plus(spent_tokens, tokens), spent_calls = runguard.plus(spent_calls, calls),
    expired_usd = runguard.plus(expired_usd, usd), expired_tokens = runguard.plus(expired_tokens, tokens),
    expired_calls = runguard.plus(expired_calls, calls), updated = v_now
  FROM (
    SELECT k, least(sum(usd), 4611686018427387903)::bigint AS usd, least(sum(tokens), 4611686018427387903)::bigint AS tokens,
      least(sum(calls), 4611686018427387903)::bigint AS calls
    FROM runguard.holds, unnest(keys) AS k WHERE id = ANY (v_ids) GROUP BY k
  ) AS late WHERE a.key = late.k;
  UPDATE runguard.holds SET state = 'expired', updated = v_now, paid_usd = usd, paid_tokens = tokens, paid_calls = calls WHERE id = ANY (v_ids);
  RETURN cardinality(v_ids);
END $$;

-- The second half of a reservation that met overdue holds. It changes nothing of the decision: what is due is the same, held or spent.
CREATE FUNCTION runguard.charged(p_keys text[]) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  PERFORM runguard.expire();
  RETURN '[' || coalesce(runguard.balances(p_keys), '') || ']';
END $$;

-- Hold an amount on all lines or on none. The hold is written first: its id guards against its twin.
CREATE FUNCTION runguard.reserve(p_hold text, p_ttl float8, p_names text[], p_times float8[], p_caps bigint[], p_want bigint[], p_force boolean)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  n int := cardinality(p_names) / 5;
  v_now float8 := date_part('epoch', clock_timestamp());
  v_control bigint;
  v_late boolean;
  v_row text;
  v_rows text;
  v_done int := 0;
  v_stale boolean := false;
  v_new boolean := false;
  v_state text;
BEGIN
  FOR i IN 1 .. n LOOP
    v_stale := v_stale OR coalesce(v_now < p_times[i], false) OR coalesce(v_now >= p_times[n + i], false);
  END LOOP;
  IF NOT v_stale THEN
    INSERT INTO runguard.holds VALUES (p_hold, p_names[1 : n], 'open', v_now + p_ttl, v_now, p_want[1], p_want[2], p_want[3]) ON CONFLICT (id) DO NOTHING;
    v_new := FOUND;
  END IF;
  IF NOT v_new THEN
    SELECT state INTO v_state FROM runguard.holds WHERE id = p_hold;
    IF v_stale AND v_state IS NULL THEN
      RETURN runguard.answer(false, true, v_now, runguard.control(), false, NULL);
    END IF;
    RETURN runguard.answer(coalesce(v_state = 'open', false), false, v_now, runguard.control(), false, runguard.balances(p_names[1 : n]));
  END IF;

  FOR i IN 1 .. n LOOP
    FOR attempt IN 1 .. 2 LOOP
      UPDATE runguard.accounts AS a SET
        cap_usd = p_caps[3 * i - 2], cap_tokens = p_caps[3 * i - 1], cap_calls = p_caps[3 * i], updated = v_now,
        held_usd = runguard.plus(held_usd, p_want[1]), held_tokens = runguard.plus(held_tokens, p_want[2]), held_calls = runguard.plus(held_calls, p_want[3])
      WHERE key = p_names[i] AND (p_force OR (
        NOT closed AND p_want[1] <= p_caps[3 * i - 2] + granted_usd - spent_usd - held_usd
        AND p_want[2] <= p_caps[3 * i - 1] + granted_tokens - spent_tokens - held_tokens
        AND p_want[3] <= p_caps[3 * i] + granted_calls - spent_calls - held_calls))
      RETURNING runguard.shown(a), (SELECT version FROM runguard.documents WHERE name = 'control'),
        EXISTS (SELECT FROM runguard.holds WHERE state = 'open' AND expires <= v_now AND id <> p_hold)
      INTO v_row, v_control, v_late;
      EXIT WHEN v_row IS NOT NULL OR attempt = 2;
      PERFORM runguard.touch(p_names, p_times, p_caps, i, v_now);  -- it may just be new
    END LOOP;
    EXIT WHEN v_row IS NULL;
    v_done := i;
    v_rows := CASE WHEN i = 1 THEN v_row ELSE v_rows || ',' || v_row END;
  END LOOP;

  v_now := date_part('epoch', clock_timestamp());  -- there may have been a queue
  FOR i IN 1 .. n LOOP
    v_stale := v_stale OR coalesce(v_now >= p_times[n + i], false);
  END LOOP;
  IF v_done < n OR v_stale THEN
    DELETE FROM runguard.holds WHERE id = p_hold;
    FOR i IN 1 .. n LOOP
      IF i <= v_done THEN
        UPDATE runguard.accounts SET
          held_usd = runguard.plus(held_usd, -p_want[1]), held_tokens = runguard.plus(held_tokens, -p_want[2]),
          held_calls = runguard.plus(held_calls, -p_want[3])
        WHERE key = p_names[i];
      ELSE
        PERFORM runguard.touch(p_names, p_times, p_caps, i, v_now);
      END IF;
    END LOOP;
    RETURN runguard.answer(
      false, v_stale, v_now, runguard.control(), EXISTS (SELECT FROM runguard.holds WHERE state = 'open' AND expires <= v_now),
      CASE WHEN NOT v_stale THEN runguard.balances(p_names[1 : n]) END);
  END IF;
  IF n = 0 THEN
    v_control := runguard.control();
  END IF;
  RETURN runguard.answer(true, false, v_now, v_control, v_late, v_rows);
END $$;

-- What a call took; NULL: it never left, the hold is released. The lines are for a hold that nobody knows: what was spent is a fact all the same.
CREATE FUNCTION runguard.settle(p_hold text, p_names text[], p_times float8[], p_caps bigint[], p_actual bigint[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  n int := cardinality(p_names) / 5;
  v_now float8 := date_part('epoch', clock_timestamp());
  v_actual bigint[] := coalesce(p_actual, '{0,0,0}');
  v_held bigint[];
  v_booked bigint[] := '{0,0,0}';
  v_keys text[];
  v_key text;
  v_state text := 'open';
  v_control bigint;
  v_row text;
  v_rows text;
  v_over boolean;
  v_at int;
BEGIN
  LOOP
    UPDATE runguard.holds SET state = CASE WHEN p_actual IS NULL THEN 'released' ELSE 'settled' END, updated = v_now,
      paid_usd = p_actual[1], paid_tokens = p_actual[2], paid_calls = p_actual[3]
    WHERE id = p_hold AND state = 'open' AND (p_actual IS NOT NULL OR expires > v_now) RETURNING keys, ARRAY[usd, tokens, calls] INTO v_keys, v_held;
    EXIT WHEN v_keys IS NOT NULL;
    IF p_actual IS NULL THEN  -- of one that is not known: should it still be on its way, it must not hold anything when it arrives
      INSERT INTO runguard.holds (id, keys, state, expires, updated, usd, tokens, calls) VALUES (p_hold, '{}', 'released', v_now, v_now, 0, 0, 0)
      ON CONFLICT (id) DO NOTHING;
      IF FOUND OR NOT EXISTS (SELECT 1 FROM runguard.holds WHERE id = p_hold AND state = 'open' AND expires > v_now) THEN
        RETURN runguard.answer(true, false, v_now, runguard.control(), false, NULL);
      END IF;
      CONTINUE;  -- it was made at this very moment: look again
    END IF;
    v_held := '{0,0,0}';
    SELECT keys, state, ARRAY[coalesce(paid_usd, 0), coalesce(paid_tokens, 0), coalesce(paid_calls, 0)] INTO v_keys, v_state, v_booked
    FROM runguard.holds WHERE id = p_hold FOR UPDATE;
    IF NOT FOUND THEN
      v_booked := '{0,0,0}';
      INSERT INTO runguard.holds VALUES (p_hold, p_names[1 : n], 'settled', v_now, v_now, 0, 0, 0, p_actual[1], p_actual[2], p_actual[3])
      ON CONFLICT (id) DO NOTHING RETURNING keys INTO v_keys;
      IF v_keys IS NOT NULL THEN
        FOR i IN 1 .. n LOOP
          PERFORM runguard.touch(p_names, p_times, p_caps, i, v_now);
        END LOOP;
        EXIT;
      END IF;  -- else it was written at this moment: look again
    ELSIF v_state <> 'open' THEN
      IF v_state = 'released' AND cardinality(v_keys) = 0 THEN  -- released before it was made: nobody knew its accounts
        v_keys := p_names[1 : n];
      END IF;
      UPDATE runguard.holds SET keys = v_keys, state = 'settled', updated = v_now, paid_usd = p_actual[1], paid_tokens = p_actual[2], paid_calls = p_actual[3]
      WHERE id = p_hold;
      EXIT;
    END IF;
  END LOOP;

  FOREACH v_key IN ARRAY v_keys LOOP
    FOR attempt IN 1 .. 2 LOOP
      UPDATE runguard.accounts AS a SET
        held_usd = runguard.plus(held_usd, -v_held[1]), held_tokens = runguard.plus(held_tokens, -v_held[2]), held_calls = runguard.plus(held_calls, -v_held[3]),
        spent_usd = runguard.plus(spent_usd, v_actual[1] - v_booked[1]), spent_tokens = runguard.plus(spent_tokens, v_actual[2] - v_booked[2]),
        spent_calls = runguard.plus(spent_calls, v_actual[3] - v_booked[3]), updated = v_now
      WHERE key = v_key
      RETURNING runguard.shown(a), (SELECT version FROM runguard.documents WHERE name = 'control'),
        (v_actual[1] > v_held[1] + v_booked[1] AND spent_usd + held_usd > cap_usd + granted_usd)
        OR (v_actual[2] > v_held[2] + v_booked[2] AND spent_tokens + held_tokens > cap_tokens + granted_tokens)
        OR (v_actual[3] > v_held[3] + v_booked[3] AND spent_calls + held_calls > cap_calls + granted_calls)
      INTO v_row, v_control, v_over;
      v_at := array_position(p_names[1 : n], v_key);
      EXIT WHEN v_row IS NOT NULL OR v_at IS NULL;
      PERFORM runguard.touch(p_names, p_times, p_caps, v_at, v_now);  -- dropped by a purge meanwhile
    END LOOP;
    IF v_over OR v_state = 'expired' THEN  -- it billed more than it held and broke a limit, or it was charged before
      UPDATE runguard.accounts AS a SET closed = closed OR v_over,
        expired_usd = CASE WHEN v_state = 'expired' THEN runguard.plus(expired_usd, -v_booked[1]) ELSE expired_usd END,
        expired_tokens = CASE WHEN v_state = 'expired' THEN runguard.plus(expired_tokens, -v_booked[2]) ELSE expired_tokens END,
        expired_calls = CASE WHEN v_state = 'expired' THEN runguard.plus(expired_calls, -v_booked[3]) ELSE expired_calls END,
        overrun_usd = runguard.beyond(v_actual[1] - v_held[1] - v_booked[1], spent_usd + held_usd - cap_usd - granted_usd, overrun_usd),
        overrun_tokens = runguard.beyond(v_actual[2] - v_held[2] - v_booked[2], spent_tokens + held_tokens - cap_tokens - granted_tokens, overrun_tokens),
        overrun_calls = runguard.beyond(v_actual[3] - v_held[3] - v_booked[3], spent_calls + held_calls - cap_calls - granted_calls, overrun_calls)
      WHERE key = v_key RETURNING runguard.shown(a) INTO v_row;
    END IF;
    v_rows := CASE WHEN v_rows IS NULL THEN v_row WHEN v_row IS NULL THEN v_rows ELSE v_rows || ',' || v_row END;
  END LOOP;
  RETURN runguard.answer(true, false, v_now, v_control, false, v_rows);
END $$;

-- An account that an overrun closed opens when its limit is above what is due.
CREATE FUNCTION runguard.extend(p_names text[], p_times float8[], p_caps bigint[], p_more bigint[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  v_row text;
BEGIN
  PERFORM runguard.touch(p_names, p_times, p_caps, 1, runguard.clock());
  UPDATE runguard.accounts SET
    granted_usd = runguard.plus(granted_usd, p_more[1]), granted_tokens = runguard.plus(granted_tokens, p_more[2]),
    granted_calls = runguard.plus(granted_calls, p_more[3])
  WHERE key = p_names[1];
  UPDATE runguard.accounts AS a SET closed = closed AND (spent_usd + held_usd > cap_usd + granted_usd
    OR spent_tokens + held_tokens > cap_tokens + granted_tokens OR spent_calls + held_calls > cap_calls + granted_calls)
  WHERE key = p_names[1] RETURNING runguard.shown(a) INTO v_row;
  RETURN v_row;
END $$;

-- Accounts, and how many overdue holds were charged for this: a full batch means that there may be more.
CREATE FUNCTION runguard.read(p_scope text, OUT charged bigint, OUT accounts text) LANGUAGE plpgsql AS $$
BEGIN
  charged := runguard.expire();
  IF p_scope IS NULL THEN
    SELECT string_agg(runguard.shown(a), ',' ORDER BY key) INTO accounts FROM runguard.accounts AS a;
  ELSE
    SELECT string_agg(runguard.shown(a), ',' ORDER BY key) INTO accounts FROM runguard.accounts AS a WHERE scope = p_scope;
  END IF;
  accounts := '[' || coalesce(accounts, '') || ']';
END $$;

CREATE FUNCTION runguard.put(p_name text, p_version bigint, p_text text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF p_version = 0 THEN
    INSERT INTO runguard.documents VALUES (p_name, 1, p_text) ON CONFLICT (name) DO NOTHING;
  ELSE
    UPDATE runguard.documents SET version = version + 1, text = p_text WHERE name = p_name AND version = p_version;
  END IF;
  RETURN FOUND;
END $$;

CREATE FUNCTION runguard.beat(p_run text, p_worker text, p_text text, p_ended boolean, p_long text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO runguard.runs VALUES (p_run, p_worker, runguard.clock(), p_ended, p_text, p_long)
  ON CONFLICT (id) DO UPDATE SET worker = excluded.worker, beat = excluded.beat, ended = excluded.ended, text = excluded.text;
  RETURN coalesce(runguard.control(), 0);
END $$;

CREATE FUNCTION runguard.claim(p_key text, p_ttl float8) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  v_now float8 := runguard.clock();
BEGIN
  INSERT INTO runguard.claims AS c VALUES (p_key, 'pending', v_now + p_ttl)
  ON CONFLICT (key) DO UPDATE SET state = 'pending', expires = excluded.expires WHERE c.state <> 'done' AND c.expires <= v_now;
  IF FOUND THEN
    RETURN 'yes';
  END IF;
  RETURN coalesce((SELECT state FROM runguard.claims WHERE key = p_key), 'pending');
END $$;

CREATE FUNCTION runguard.finish(p_key text, p_done boolean) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF p_done THEN
    INSERT INTO runguard.claims VALUES (p_key, 'done', runguard.clock())
    ON CONFLICT (key) DO UPDATE SET state = 'done', expires = excluded.expires;
  ELSE
    DELETE FROM runguard.claims WHERE key = p_key AND state = 'pending';
  END IF;
END $$;

-- Drop a part of what is old, so that no purge is long; how much there was. What somebody works on stays for another time.
CREATE FUNCTION runguard.purge(p_old float8, p_most int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  v_keys text[];
  v_rows bigint;
  v_all bigint;
BEGIN
  v_all := runguard.expire();
  DELETE FROM runguard.holds WHERE id IN (
    SELECT id FROM runguard.holds WHERE state <> 'open' AND updated < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  DELETE FROM runguard.records WHERE seq IN (SELECT seq FROM runguard.records WHERE at < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  DELETE FROM runguard.runs WHERE id IN (SELECT id FROM runguard.runs WHERE beat < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  DELETE FROM runguard.claims WHERE key IN (SELECT key FROM runguard.claims WHERE expires < p_old LIMIT p_most FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_rows = ROW_COUNT;
  v_all := v_all + v_rows;
  SELECT array_agg(key) INTO v_keys FROM (
    SELECT key FROM runguard.accounts WHERE held_usd = 0 AND held_tokens = 0 AND held_calls = 0 AND (ends < p_old OR ((scope LIKE 'run%' OR scope LIKE 'session:%') AND updated < p_old))
    LIMIT p_most FOR UPDATE SKIP LOCKED
  ) AS past;
  DELETE FROM runguard.marks WHERE key = ANY (v_keys);
  DELETE FROM runguard.accounts WHERE key = ANY (v_keys);
  RETURN v_all + coalesce(cardinality(v_keys), 0);
END $$;

CREATE TABLE runguard.runguard_schema (version integer NOT NULL);
