package bench

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

const (
	// createTime is how long the simulated driver takes to create a GPU instance.
	createTime = 200 * time.Millisecond
	// pace is the time from the start of one Prepare of a whole GPU to the next.
	pace = 20 * time.Millisecond
)

// atOnce starts a Prepare of all claims at the same moment. It returns the time until the last
// claim is prepared.
func (s *testNode) atOnce(claims []*resourceapi.ResourceClaim) time.Duration {
	s.t.Helper()
	var all sync.WaitGroup
	begin := time.Now()
	for _, c := range claims {
		all.Go(func() {
			if _, err := s.Prepare(s.t.Context(), c); err != nil {
				s.t.Error(err)
			}
		})
	}
	all.Wait()
	took := time.Since(begin)
	if s.t.Failed() {
		s.t.FailNow()
	}
	return took
}

// cycleWholeGPU prepares and unprepares a claim for the whole GPU until ctx ends or count rounds
// are done. It returns the durations of Prepare.
func (s *testNode) cycleWholeGPU(ctx context.Context, gpu string, count int) []time.Duration {
	c := s.claim(gpu)
	var took []time.Duration
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for len(took) < count {
		begin := time.Now()
		_, err := s.Prepare(s.t.Context(), c)
		took = append(took, time.Since(begin))
		if err == nil {
			err = s.Unprepare(s.t.Context(), c.UID)
		}
		if err != nil {
			s.t.Error(err)
			return took
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return took
		}
	}
	return took
}

func median(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// within fails the test if duration took is more than limit times duration of. Both were measured
// in the same run, so a slow machine does not matter. what names the comparison in the log.
func within(t *testing.T, what string, took, of time.Duration, limit float64) {
	t.Helper()
	ratio := float64(took) / float64(of)
	t.Logf("%s: %v to %v is %.3f, limit %.1f", what, took.Round(10*time.Microsecond), of.Round(10*time.Microsecond), ratio, limit)
	if ratio > limit {
		t.Errorf("%s takes too long", what)
	}
}

// during prepares and unprepares a claim for the whole GPU again and again while work runs. It
// returns the durations of Prepare.
func (s *testNode) during(gpu string, work func()) (took []time.Duration) {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.t.Context())
	var whole sync.WaitGroup
	whole.Go(func() { took = s.cycleWholeGPU(ctx, gpu, 1<<30) })
	work()
	stop()
	whole.Wait()
	return took
}

// The simulated driver creates only one GPU instance at a time. The test expects that 56 claims for
// partitions take hardly longer than their creations, and that a claim for a whole GPU does not
// wait for them.
func TestDriverWideLockDelaysOnlyPartitions(t *testing.T) {
	const samples = 150
	s := newTestNode(t, 9)
	s.hardware(state.CutLockDriver, createTime)
	whole, claims := s.gpus[8], s.smallest(s.gpus[:8]...)
	s.claim(whole)
	alone := s.cycleWholeGPU(t.Context(), whole, samples)
	var took time.Duration
	meanwhile := s.during(whole, func() { took = s.atOnce(claims) })
	alone = append(alone, s.cycleWholeGPU(t.Context(), whole, samples)...)
	within(t, "56 claims at once, to the sum of the creations", took, time.Duration(len(claims))*createTime, 1.1)
	within(t, "a whole GPU meanwhile, to one alone", median(meanwhile), median(alone), 1.2)
}

// The simulated driver creates one GPU instance at a time on each GPU. The test expects that
// partitioning eight GPUs at once takes hardly longer than partitioning one.
func TestGPUsArePartitionedInParallel(t *testing.T) {
	const rounds = 3
	s := newTestNode(t, 8)
	s.hardware(state.CutLockGPU, createTime)
	claims := s.smallest(s.gpus...)
	var one, all []time.Duration
	for i := range rounds {
		one = append(one, s.atOnce(s.smallest(s.gpus[i])))
		s.unprepareAll()
		all = append(all, s.atOnce(claims))
		s.unprepareAll()
	}
	within(t, "56 claims on eight GPUs at once, to seven on one", median(all), median(one), 1.3)
}

// The test expects that a claim for a whole GPU does not wait while GPU instances are created on
// eight other GPUs. The creations also slow it down because they share the disk and the processors.
// To measure that part alone, a plugin on a second node does the same creations.
func TestWholeGPUDoesNotWaitForPartitions(t *testing.T) {
	const rounds, samples = 6, 80
	s, other := newTestNode(t, 9), newTestNode(t, 8)
	s.hardware(state.CutLockGPU, createTime)
	other.hardware(state.CutLockGPU, createTime)
	whole, claims, others := s.gpus[8], s.smallest(s.gpus[:8]...), other.smallest(other.gpus...)
	s.claim(whole)
	var alone, same, otherNode []time.Duration
	for range rounds {
		alone = append(alone, s.cycleWholeGPU(t.Context(), whole, samples)...)
		same = append(same, s.during(whole, func() { s.atOnce(claims) })...)
		s.unprepareAll()
		otherNode = append(otherNode, s.during(whole, func() { other.atOnce(others) })...)
		other.unprepareAll()
	}
	within(t, "a whole GPU during 56 creations, to one during those of another node", median(same), median(otherNode), 1.2)
	within(t, "a whole GPU during 56 creations, to one alone", median(same), median(alone), 2)
	within(t, "its 95th percentile, to one creation", same[len(same)*19/20], createTime, 0.5)
}
