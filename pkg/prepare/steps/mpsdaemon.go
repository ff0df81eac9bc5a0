package steps

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/cause"
)

const MPSDaemonKind = "mps-daemon"

// MPSDaemon is the step that runs an MPS control daemon for some devices. The daemon serves one
// claim, or all claims that have fractions of one device.
type MPSDaemon struct {
	change
	ID string `json:"id"`
	// Devices are names and not UUIDs, because a MIG device has no UUID before it is created.
	Devices []string `json:"devices"`
	// ThreadPercentage limits the part of the GPU's threads that each client process can use. Zero
	// means no limit.
	ThreadPercentage int `json:"threadPercentage,omitempty"`
	// Memory limits the GPU memory of each client process, in MiB. Zero means no limit.
	Memory uint64 `json:"memory,omitempty"`
	// PerDevice overrides Memory for single devices. Its keys are UUIDs or indexes into the sorted
	// UUIDs.
	PerDevice map[string]uint64 `json:"perDevice,omitempty"`
	MultiUser bool              `json:"multiUser,omitempty"`
	// UUIDs are the UUIDs of Devices when the daemon was last started. UUIDs is empty if the daemon
	// was never started.
	UUIDs []string `json:"uuids,omitempty"`
}

var _ Sharable = &MPSDaemon{}

func (s *MPSDaemon) Kind() string { return MPSDaemonKind }

func (s *MPSDaemon) describe() string {
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

func (s *MPSDaemon) assumeDefaults() { s.UUIDs = slices.Clone(s.Devices) }

func (*MPSDaemon) reset(ctx context.Context, env *Env, of string) error { return env.MPS.Stop(ctx, of) }

func (s *MPSDaemon) Apply(ctx context.Context, env *Env) error {
	uuids, err := s.uuids(env)
	if err != nil {
		return err
	}
	return s.start(ctx, env, uuids)
}

// maintain starts the daemon if it does not run. It restarts the daemon if one of its MIG devices
// was recreated and now has another UUID. That harms no client, because the clients ended with the
// old device.
func (s *MPSDaemon) maintain(ctx context.Context, env *Env) error {
	uuids, err := s.uuids(env)
	if err != nil {
		return err
	}
	if len(s.UUIDs) == 0 { // it is unknown with which UUIDs the daemon was started
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

func (s *MPSDaemon) Revert(ctx context.Context, env *Env) error {
	if len(s.UUIDs) == 0 {
		return nil
	}
	if err := s.stop(ctx, env); err != nil {
		return err
	}
	s.UUIDs = nil
	return nil
}

func (s *MPSDaemon) start(ctx context.Context, env *Env, uuids []string) error {
	s.UUIDs = uuids
	if _, err := s.Daemon(); err != nil {
		return err
	}
	if err := env.Journal(); err != nil {
		return err
	}
	return s.run(ctx, env)
}

func (s *MPSDaemon) run(ctx context.Context, env *Env) error {
	d, err := s.Daemon()
	if err != nil {
		return err
	}
	work, cancel := context.WithTimeoutCause(ctx, daemonTime, fmt.Errorf("the MPS daemon was not ready within %s", daemonTime))
	defer cancel()
	if err := env.MPS.Start(work, d); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(s.Devices, ", "), err)
	}
	return nil
}

func (s *MPSDaemon) stop(ctx context.Context, env *Env) error {
	work, cancel := context.WithTimeoutCause(ctx, daemonTime, fmt.Errorf("the MPS daemon did not stop within %s", daemonTime))
	defer cancel()
	if err := env.MPS.Stop(work, s.ID); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(s.Devices, ", "), err)
	}
	return nil
}

func (s *MPSDaemon) uuids(env *Env) ([]string, error) {
	uuids := make([]string, len(s.Devices))
	for i, d := range s.Devices {
		var err error
		if uuids[i], err = env.UUID(d); err != nil {
			return nil, err
		}
	}
	return uuids, nil
}

// Daemon returns the step's Daemon in the form that the MPS supervisor needs to start it.
func (s *MPSDaemon) Daemon() (mps.Daemon, error) {
	d := mps.Daemon{ID: s.ID, Devices: s.UUIDs, MultiUser: s.MultiUser, MemoryLimits: map[int]uint64{}}
	if s.ThreadPercentage > 0 {
		d.ThreadPercentage = &s.ThreadPercentage
	}
	if s.Memory > 0 {
		for i := range s.UUIDs {
			d.MemoryLimits[i] = s.Memory
		}
	}
	// The keys are sorted, so that a device's UUID comes after every index and overrides it.
	for _, key := range slices.Sorted(maps.Keys(s.PerDevice)) {
		i, err := s.ordinal(key)
		if err != nil {
			return d, cause.Errorf(cause.Claim, "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[%q]: %w", key, err)
		}
		d.MemoryLimits[i] = s.PerDevice[key]
	}
	return d, nil
}

// ordinal returns the index in UUIDs of the device that key names. A key that is a number counts
// the UUIDs in sorted order, as in NVIDIA's DRA driver.
func (s *MPSDaemon) ordinal(key string) (int, error) {
	if i := slices.Index(s.UUIDs, key); i >= 0 {
		return i, nil
	}
	i, err := strconv.Atoi(key)
	switch {
	case err != nil:
		return 0, fmt.Errorf("no device of this configuration has this UUID: use one of %s", strings.Join(s.UUIDs, ", "))
	case i < 0 || i >= len(s.UUIDs):
		return 0, fmt.Errorf("the configuration has %d devices, counted from 0", len(s.UUIDs))
	}
	return slices.Index(s.UUIDs, slices.Sorted(slices.Values(s.UUIDs))[i]), nil
}
