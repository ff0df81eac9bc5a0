package prepare

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// Daemons runs MPS control daemons. [mps.Client] does; but where nobody runs them, Stop has to say that a daemon is gone or why that cannot be told.
type Daemons interface {
	// Start returns when the daemon is ready. One that runs as it should is left alone.
	Start(ctx context.Context, d mps.Daemon) error
	// Stop returns when nothing of the daemon is left. One that is not there is stopped already.
	Stop(ctx context.Context, id string) error
	// List says which daemons there are. Where nobody runs daemons the error is an [*mps.NotRunningError].
	List(ctx context.Context) ([]mps.Status, error)
}

// daemonTime bounds the start or the end of a daemon, which takes milliseconds unless its GPU hangs.
const daemonTime = 20 * time.Second

const mpsDaemonKind = "mps-daemon"

// mpsDaemon runs a control daemon over devices, for the claims that hold them or for one claim.
type mpsDaemon struct {
	ID string `json:"id"`
	// Devices are named: which MIG devices they are is known when they are cut.
	Devices []string `json:"devices"`
	// ThreadPercentage, and Memory in MiB, hold for each client process; zero is no limit.
	ThreadPercentage int    `json:"threadPercentage,omitempty"`
	Memory           uint64 `json:"memory,omitempty"`
	// PerDevice is Memory for single devices, by their UUIDs or their index in the order of the
	// UUIDs.
	PerDevice map[string]uint64 `json:"perDevice,omitempty"`
	MultiUser bool              `json:"multiUser,omitempty"`
	// UUIDs are those of the devices when the daemon was asked for. There are none while it was not.
	UUIDs []string `json:"uuids,omitempty"`
}

var _ sharable = &mpsDaemon{}

func (s *mpsDaemon) Kind() string { return mpsDaemonKind }

func (s *mpsDaemon) wanted() string {
	text := fmt.Sprintf("MPS daemon %s over %s", s.ID, strings.Join(s.Devices, ", "))
	if s.ThreadPercentage > 0 {
		text += fmt.Sprintf(" with %d %% of the threads", s.ThreadPercentage)
	}
	if s.Memory > 0 {
		text += fmt.Sprintf(" with %d MiB", s.Memory)
	}
	for _, key := range slices.Sorted(maps.Keys(s.PerDevice)) {
		text += fmt.Sprintf(" with %d MiB of device %s", s.PerDevice[key], key)
	}
	if s.MultiUser {
		text += " for all users"
	}
	return text
}

func (s *mpsDaemon) unknown() { s.UUIDs = slices.Clone(s.Devices) }

func (s *mpsDaemon) Apply(ctx context.Context, env *Env) error {
	uuids, err := s.uuids(env)
	if err != nil {
		return err
	}
	return s.start(ctx, env, uuids)
}

// keep starts another daemon where a MIG device was made again with another UUID: the old one's device is gone, and its clients with it.
func (s *mpsDaemon) keep(ctx context.Context, env *Env) error {
	uuids, err := s.uuids(env)
	if err != nil {
		return err
	}
	if len(s.UUIDs) == 0 { // it is not known what it was started with
		s.UUIDs = uuids
	}
	if slices.Equal(uuids, s.UUIDs) {
		return s.run(ctx, env)
	}
	if err := s.stop(ctx, env); err != nil {
		return err
	}
	return s.start(ctx, env, uuids)
}

func (s *mpsDaemon) Revert(ctx context.Context, env *Env) error {
	if len(s.UUIDs) == 0 {
		return nil
	}
	if err := s.stop(ctx, env); err != nil {
		return err
	}
	s.UUIDs = nil
	return nil
}

func (s *mpsDaemon) start(ctx context.Context, env *Env, uuids []string) error {
	s.UUIDs = uuids
	if _, err := s.daemon(); err != nil {
		return err
	}
	if err := env.Journal(); err != nil {
		return err
	}
	return s.run(ctx, env)
}

func (s *mpsDaemon) run(ctx context.Context, env *Env) error {
	d, err := s.daemon()
	if err != nil {
		return err
	}
	work, cancel := context.WithTimeoutCause(ctx, daemonTime, fmt.Errorf("it was not ready within %s", daemonTime))
	defer cancel()
	if err := env.MPS.Start(work, d); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(s.Devices, ", "), err)
	}
	return nil
}

func (s *mpsDaemon) stop(ctx context.Context, env *Env) error {
	work, cancel := context.WithTimeoutCause(ctx, daemonTime, fmt.Errorf("it was not gone within %s", daemonTime))
	defer cancel()
	if err := env.MPS.Stop(work, s.ID); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(s.Devices, ", "), err)
	}
	return nil
}

func (s *mpsDaemon) uuids(env *Env) ([]string, error) {
	uuids := make([]string, len(s.Devices))
	for i, d := range s.Devices {
		var err error
		if uuids[i], err = env.UUID(d); err != nil {
			return nil, err
		}
	}
	return uuids, nil
}

// daemon says what the supervisor is asked for.
func (s *mpsDaemon) daemon() (mps.Daemon, error) {
	d := mps.Daemon{ID: s.ID, Devices: s.UUIDs, MultiUser: s.MultiUser, MemoryLimits: map[int]uint64{}}
	if s.ThreadPercentage > 0 {
		d.ThreadPercentage = &s.ThreadPercentage
	}
	if s.Memory > 0 {
		for i := range s.UUIDs {
			d.MemoryLimits[i] = s.Memory
		}
	}
	// In order: a UUID, which says more than an index, comes after every index.
	for _, key := range slices.Sorted(maps.Keys(s.PerDevice)) {
		i, err := s.ordinal(key)
		if err != nil {
			return d, because(CauseClaim, "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%q]: %w", key, err)
		}
		d.MemoryLimits[i] = s.PerDevice[key]
	}
	return d, nil
}

// ordinal is a place in UUIDs. An index counts as in NVIDIA's reference driver, which sorts them.
func (s *mpsDaemon) ordinal(key string) (int, error) {
	if i := slices.Index(s.UUIDs, key); i >= 0 {
		return i, nil
	}
	i, err := strconv.Atoi(key)
	switch {
	case err != nil:
		return 0, fmt.Errorf("none of the devices that the configuration is for has this UUID: they are %s", strings.Join(s.UUIDs, ", "))
	case i < 0 || i >= len(s.UUIDs):
		return 0, fmt.Errorf("the configuration is for %d devices, which are counted from 0", len(s.UUIDs))
	}
	return slices.Index(s.UUIDs, slices.Sorted(slices.Values(s.UUIDs))[i]), nil
}
