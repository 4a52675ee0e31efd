-- Makes the role and the database of a VeilMQ cluster, and says what is wrong with PostgreSQL's settings. A second run
-- changes nothing. On the primary, as a superuser, once its standby is connected:
--
--     psql -v password=SECRET -d postgres -f postgres.sql
--
-- It exits with 3 if something is wrong, and has made nothing then. Both are called veilmq, or as `-v name=NAME` says.
-- Then: veilmq cluster init --cluster postgresql://veilmq@PRIMARY,STANDBY/veilmq
\set QUIET on
\set ON_ERROR_STOP on
\set VERBOSITY terse
\if :{?name}
\else
    \set name veilmq
\endif
\if :{?password}
    \set has_password true
\else
    \set has_password false
\endif
\pset tuples_only on
\pset format unaligned

select string_agg(said, e'\n') as wrong from (
    select 'PostgreSQL ' || current_setting('server_version') || ' is too old: use 14 or later'
        where current_setting('server_version_num')::int < 140000
    union all select 'the role needs a password: give -v password=SECRET' where not :has_password
    union all select 'this is a standby: run this on the primary' where pg_is_in_recovery()
    union all select 'no standby confirms commits: set synchronous_standby_names'
        where btrim(current_setting('synchronous_standby_names')) = ''
    union all select 'none of the standbys in synchronous_standby_names is connected: start it'
        where btrim(current_setting('synchronous_standby_names')) <> ''
        and not exists (select from pg_stat_replication where sync_state in ('sync', 'quorum'))
    union all select 'files are not synced: set fsync = on' where current_setting('fsync') <> 'on'
    union all select 'torn pages are not mended: set full_page_writes = on' where current_setting('full_page_writes') <> 'on'
) as all_of_them(said) \gset

\if :{?wrong}
    select :'wrong' <> '' as is_wrong \gset
\else
    select false as is_wrong \gset
\endif
\if :is_wrong
    \echo :wrong
    do $$ begin raise 'nothing was made'; end $$;
\endif

select format('create role %I login password %L', :'name', :'password')
    where not exists (select from pg_roles where rolname = :'name') \gexec
grant pg_monitor to :"name";
select format('create database %I owner %I', :'name', :'name')
    where not exists (select from pg_database where datname = :'name') \gexec
\echo 'ready: run veilmq cluster init'
