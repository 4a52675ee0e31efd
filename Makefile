# `make run` serves, `make test` runs every test, `make check` the fast part. Each sets up what it needs first, in .venv and
# .tools, and starts at once when nothing changed since. On Debian as root or with sudo, missing system packages come through
# apt; elsewhere the first failing step names what to install.

SHELL := /bin/sh
.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# Tests wait for clocks, processes and the disk: four workers keep two cores busy.
# With a worker gone the scheduler of loadgroup waits for ever: better to end there, and say what it was running.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
# What `make run` and `make bench` hand on, e.g. make run ARGS="--data /var/lib/veilmq"
ARGS ?=

# A stamp is newer than everything that it was made from, so a changed lock installs again and nothing else does.
RUN_STAMP := .venv/.installed-run
TEST_STAMP := .venv/.installed-dev
ACCELERATOR := tools/accelerator.py $(wildcard src/veilmq/accelerator/*.[ch])
NODE_VERSION := 22.23.3
# Clients that only the slow tests drive, each kind in a place of its own.
CLIENT_STAMPS := .tools/botocore-1.31/.installed .tools/aws/.installed .tools/clients/.installed .tools/azurite/.installed \
	.tools/django/.installed .tools/symfony/.installed .tools/axe/.installed .tools/notebook/.installed .tools/promtool/promtool \
	.tools/kubernetes/.installed .tools/spark/classes.jsa

.PHONY: help setup setup-test setup-clients run accelerator accelerator-later sanitized wheel man install release docs first-hour image lint check test bench yardstick mutants cluster cluster-faults faults fuzz simulate rabbitmq console pipeline-demo pipeline-faults \
	lock clean

help:
	@echo 'make run [ARGS="..."]   set up and serve (veilmq serve ARGS)'
	@echo 'make accelerator        build the part in C, which makes a server faster; make setup does it where it can'
	@echo 'make wheel              build dist/veilmq-*.whl, to install elsewhere'
	@echo 'make man                write the manual page and completions for bash, zsh and fish: build/share'
	@echo 'make docs               build the site of the documentation: site/index.html'
	@echo 'make install            as root: install it as a service of systemd (docs/deploy.md)'
	@echo 'make release            build what a release consists of: wheel, sdist, lock, bill of materials, checksums'
	@echo 'make check              lint, types, floors and the fast tests'
	@echo 'make test               make check and every other test'
	@echo 'make bench              measure against the peers'
	@echo 'make yardstick          CPU of a request: ARGS="--against DIR" compares with another checkout'
	@echo 'make mutants            put one bug after the other into the code: which test fails? ARGS="store/ --thorough"'
	@echo 'make simulate           an hour of simulated lives on a faulty disk: ARGS="--minutes N --seed N --seeds COUNT"'
	@echo 'make faults             half an hour of kills and other faults under load: ARGS="--minutes 3 --seed N"'
	@echo 'make cluster            PostgreSQL fails and servers race for a shard, thousands of times'
	@echo 'make cluster-faults     200 faults of a cluster under load: ARGS="--faults 20 --minutes 5 --seed N"'
	@echo 'make rabbitmq           a bridge from and to a real RabbitMQ, which it installs on Debian'
	@echo 'make console            every page of the console in Chromium, at two widths and in both themes, with pictures'
	@echo 'make first-hour         as root: what a new user wants, on a bare Debian 13, and the time to the first message'
	@echo 'make image              as root: build the Containerfile with buildah on that Debian, and try what it serves'
	@echo 'make sanitized          the tests of the part in C under ASan and UBSan'
	@echo 'make fuzz               ten minutes of coverage-guided fuzzing of HTTP and the codecs'
	@echo 'make pipeline-demo      learn timeouts from work whose truth is known, and apply them'
	@echo 'make pipeline-faults    200 kills and faults of drains and sinks on Spark: ARGS="--faults 20 --minutes 10 --seed N"'
	@echo 'make setup              set up what make run needs, and stop there'
	@echo 'make setup-clients      set up what make test needs: other SDKs, Node.js'
	@echo 'make lock               resolve requirements/*.txt again'
	@echo 'make clean              remove everything that make made (not veilmq-data)'

setup: $(RUN_STAMP) accelerator-later
	@:

# A compiler may come after the first set-up, which said what was missing: this says nothing.
accelerator-later:
	@set -- src/veilmq/accelerator/_native*.so $${CC:-cc}; [ -e "$$1" ] || ! command -v "$$2" >/dev/null || \
		$(BIN)/python tools/accelerator.py --later

# The default Java of Debian: 17 on Debian 12, 21 on Debian 13.
setup-test: $(TEST_STAMP) accelerator-later .tools/docs/.installed
	@tools/need.sh strace strace
	@tools/need.sh openssl openssl
	@tools/need.sh groff groff-base
	@tools/need.sh systemd-analyze systemd
	@PATH="$$PATH:/usr/sbin" tools/need.sh ip iproute2
	@PATH="$$PATH:/usr/sbin" tools/need.sh haproxy haproxy
	@tools/need.sh java default-jre-headless

$(RUN_STAMP): requirements/run.txt pyproject.toml tools/install.sh tools/need.sh $(ACCELERATOR)
	@tools/install.sh requirements/run.txt
	@touch $@

# The lock for development holds everything of the lock to run, so both stamps are made.
$(TEST_STAMP): requirements/dev.txt requirements/run.txt pyproject.toml tools/install.sh tools/need.sh $(ACCELERATOR)
	@tools/install.sh requirements/dev.txt
	@touch $(RUN_STAMP) $@

# Node.js for the test sets that drive a JavaScript SDK: a target that needs it depends on .tools/node and runs
# .tools/node/bin/node.
.tools/node: tools/install-node.sh
	@tools/install-node.sh $(NODE_VERSION) $@
	@touch $@

setup-clients: setup-test $(CLIENT_STAMPS)
	@tools/need.sh chromium chromium
	@tools/need.sh zsh zsh
	@tools/need.sh fish fish

.tools/botocore-1.31/.installed: requirements/query.txt tools/install-venv.sh | $(TEST_STAMP)
	@tools/install-venv.sh requirements/query.txt $(@D)
	@touch $@

# A Jupyter kernel for docs/notebooks; the packages of .venv are put before its own.
.tools/notebook/.installed: requirements/notebook.txt tools/install-venv.sh | $(TEST_STAMP)
	@tools/install-venv.sh requirements/notebook.txt $(@D)
	@touch $@

.tools/aws/.installed: requirements/aws.txt tools/install-venv.sh | $(TEST_STAMP)
	@tools/install-venv.sh requirements/aws.txt $(@D)
	@touch $@

# Django's tasks need a later Python than .venv may have.
.tools/django/.installed: requirements/django.txt tools/install-django.sh | $(TEST_STAMP)
	@tools/install-django.sh requirements/django.txt $(@D)
	@touch $@

.tools/symfony/.installed: tools/take-symfony.sh
	@tools/take-symfony.sh $(@D)
	@touch $@

# The schemas that deploy/kubernetes is held against: 120 MB, of every release of Kubernetes.
.tools/kubernetes/.installed: requirements/kubernetes.txt tools/install-venv.sh | $(TEST_STAMP)
	@tools/install-venv.sh requirements/kubernetes.txt $(@D)
	@touch $@

# What builds the site of the documentation, in a place of its own.
.tools/docs/.installed: requirements/docs.txt tools/install-venv.sh | $(RUN_STAMP)
	@tools/install-venv.sh requirements/docs.txt $(@D)
	@touch $@

# One more JavaScript client is one more line in package.json, and `make lock`.
.tools/clients/.installed: tests/clients/js/package.json tests/clients/js/package-lock.json tools/install-clients.sh tools/install-npm.sh .tools/node
	@tools/install-clients.sh $(@D)
	@touch $@

# Classes that each Java of the tests would load anew.
.tools/spark/classes.jsa: requirements/dev.txt tools/spark_archive.py | $(TEST_STAMP)
	@echo 'veilmq: writing $@' >&2
	@$(BIN)/python tools/spark_archive.py $@ 2>.tools/spark.log || { cat .tools/spark.log >&2; exit 1; }

# The emulator that the azure adapter is tested against, besides our own port.
.tools/azurite/.installed: tests/clients/azurite/package.json tests/clients/azurite/package-lock.json tools/install-npm.sh .tools/node
	@tools/install-npm.sh tests/clients/azurite $(@D)
	@touch $@

# It checks the alarms.
.tools/promtool/promtool: tools/take-program.sh
	@tools/take-program.sh promtool prometheus $(@D)
	@touch -h $@

# What the browser tests look at the console's pages with.
.tools/axe/.installed: tests/clients/axe/package.json tests/clients/axe/package-lock.json tools/install-npm.sh .tools/node
	@tools/install-npm.sh tests/clients/axe $(@D)
	@touch $@

run: setup
	@exec $(BIN)/veilmq serve $(ARGS)

# From the commands themselves; the directories are those below /usr/local/share.
man: setup
	@$(BIN)/python tools/shell_files.py build/share

# Without it everything is plain Python, which does the same.
accelerator: $(RUN_STAMP)
	@$(BIN)/python tools/accelerator.py --must

# Leaks are found by a test that counts blocks: the interpreter itself leaves some at its end.
sanitized: setup-test
	@$(BIN)/python tools/accelerator.py --sanitized .tools/sanitized
	@env LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONMALLOC=malloc PYTHONPATH=.tools/sanitized/src VEILMQ_ACCELERATOR=on \
		$(BIN)/python -m pytest -n 0 -p no:cacheprovider tests/accelerator tests/server/test_plain.py $(ARGS)

wheel: setup
	@rm -rf dist
	@$(BIN)/python -m hatchling build --target wheel

install: wheel
	@tools/install-service.sh dist/veilmq-*.whl

release: setup .tools/release/cyclonedx/.installed
	@tools/release.sh

.tools/release/cyclonedx/.installed: requirements/release.txt tools/install-venv.sh | $(RUN_STAMP)
	@mkdir -p .tools/release
	@tools/install-venv.sh requirements/release.txt $(@D)
	@touch $@

# The site of the documentation, in site/: strict, without a network, and readable as files.
docs: setup .tools/docs/.installed
	@$(BIN)/python tools/site/build.py site

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The tests start hundreds of Pythons: compiled modules are kept, also where the environment says not to, as in containers.
check test: export PYTHONDONTWRITEBYTECODE :=

check: lint
	$(PYTEST) -m "not slow" $(ARGS)

# The second run is plain Python, where the first one had the accelerator: signatures, bytes on the wire, the store.
WITHOUT := tests/protocols/sqs/test_golden.py tests/protocols/sqs/test_signature.py tests/protocols/sqs/test_conversation.py \
	tests/server/test_plain.py tests/store/test_unflushed.py

# What the newest Python has removed is found by its types; the first time takes as long as mypy in `lint`, then seconds.
test: lint setup-clients
	$(BIN)/mypy --python-version 3.14
	$(PYTEST) $(ARGS)
	@[ -n "$(ARGS)" ] || ! $(BIN)/veilmq --version | grep -q 'accelerator on' || \
		VEILMQ_ACCELERATOR=off $(PYTEST) -m "not slow" $(WITHOUT)

# bench/run.py installs the load generator and the peers itself.
bench: setup
	@$(BIN)/python bench/run.py $(ARGS)

# A whole server in one process, without sockets: CPU of a request by stage, of this tree and of another.
yardstick: setup
	@$(BIN)/python bench/yardstick.py $(ARGS)

# In copies of the tree; each patch in tools/mutants names the tests that must fail.
mutants: setup-test
	@$(BIN)/python tools/mutants/run.py $(ARGS)

# A seed decides a life; one that breaks a promise ends the run with its story.
simulate: setup-test
	@$(BIN)/python -m tests.simulation $(ARGS)

# Debian's package starts a broker of its own; the tests run another one on free ports.
rabbitmq: setup-test
	@tools/need.sh rabbitmqctl rabbitmq-server
	@$(BIN)/python -m pytest -n 0 tests/client/test_bridge_rabbitmq.py $(ARGS)

# Twelve things that a new user wants, on a bare Debian 13 that debootstrap makes; the time to the first message.
first-hour: setup-test
	@PATH="$$PATH:/usr/sbin" tools/need.sh debootstrap debootstrap
	@tools/need.sh systemd-nspawn systemd-container
	@PATH="$$PATH:/usr/sbin" $(BIN)/python -m tests.first_hour $(ARGS)

# deploy/Containerfile without a container engine.
image: setup-test
	@PATH="$$PATH:/usr/sbin" tools/need.sh debootstrap debootstrap
	@tools/need.sh buildah buildah
	@PATH="$$PATH:/usr/sbin" $(BIN)/python -m tests.first_hour.image

# Every page of the console in Chromium, at two widths and in both themes; pictures are in .tools/console.
console: setup-clients
	@rm -rf .tools/console
	$(BIN)/python -m pytest -n 0 tests/console --shots .tools/console $(ARGS)

# A primary and a synchronous standby of PostgreSQL; servers race for a shard for some minutes, and are restarted in turn.
cluster: setup-test
	@$(BIN)/python -m pytest -n 0 tests/cluster --takeovers 10000 --restarts 10 $(ARGS)

# Three servers, PostgreSQL and its standby, and networks, disks and clocks of their own; the checker judges.
cluster-faults: setup-test
	@$(BIN)/python -m tests.faults.cluster $(ARGS)

# Kills, stops, disks and networks that fail, clocks that jump; the checker judges. docs/reliability.md has the figures.
faults: setup-test
	@$(BIN)/python -m tests.faults.suite $(ARGS)

# What it finds interesting is kept in .tools/fuzz/corpus for the next time.
fuzz: .tools/fuzz/.installed
	@PYTHONPATH=$$(echo .tools/fuzz/lib/python3*/site-packages):. $(BIN)/python tools/fuzz.py .tools/fuzz/corpus \
		-max_total_time=600 -max_len=4096 -artifact_prefix=.tools/fuzz/ $(ARGS)

.tools/fuzz/.installed: requirements/fuzz.txt tools/install-venv.sh | $(TEST_STAMP)
	@tools/install-venv.sh requirements/fuzz.txt $(@D)
	@touch $@

# A server, six kinds of work, Spark: what the pipeline recommends beside the truth, before and after.
pipeline-demo: setup-test
	@exec $(BIN)/python examples/pipeline_demo $(ARGS)

# Sources, sinks and stores, with Spark; what the tables and queues hold is compared with what was sent.
pipeline-faults: setup-clients
	@$(BIN)/python -m tests.pipeline.faults $(ARGS)

# Ranges come from pyproject.toml. The index is whatever this machine is set up for; none is written down.
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-emit-index-url \
	--no-emit-find-links --no-annotate --custom-compile-command "make lock" pyproject.toml requirements/build.in
LOCK_CLIENT := $(filter-out pyproject.toml requirements/build.in,$(LOCK))
# UPGRADE=1 takes the newest releases that the ranges admit; without it, what is locked stays.
lock: setup-test
	$(LOCK) $(if $(UPGRADE),--upgrade) --all-extras --output-file requirements/dev.txt
	$(LOCK) --extra server --constraint requirements/dev.txt --output-file requirements/run.txt
	$(subst pyproject.toml,,$(LOCK)) --constraint requirements/dev.txt --output-file requirements/build.txt
	$(LOCK_CLIENT) requirements/query.in --output-file requirements/query.txt
	$(LOCK_CLIENT) $(if $(UPGRADE),--upgrade) requirements/aws.in --output-file requirements/aws.txt
	$(subst --python-version 3.11,--python-version 3.12,$(LOCK_CLIENT)) requirements/django.in --output-file requirements/django.txt
	$(LOCK_CLIENT) requirements/fuzz.in --output-file requirements/fuzz.txt
	$(LOCK_CLIENT) requirements/docs.in --output-file requirements/docs.txt
	$(LOCK_CLIENT) requirements/notebook.in --output-file requirements/notebook.txt
	$(LOCK_CLIENT) requirements/kubernetes.in --output-file requirements/kubernetes.txt
	$(LOCK_CLIENT) requirements/release.in --output-file requirements/release.txt
	npm install --loglevel=error --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund \
		--prefix tests/clients/js
	npm install --loglevel=error --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund \
		--prefix tests/clients/azurite
	npm install --loglevel=error --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund \
		--prefix tests/clients/axe

clean:
	rm -rf .venv .tools bench/.peers bench/.data build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
