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
	// cut is how long the driver takes to make a GPU instance.
	cut = 200 * time.Millisecond
	// pace is how often a whole GPU is wanted meanwhile.
	pace = 20 * time.Millisecond
)

// atOnce prepares the claims all at the same moment, and returns how long it takes until the last one is prepared.
func (s *stand) atOnce(claims []*resourceapi.ResourceClaim) time.Duration {
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

// wholes prepares a whole GPU again and again until ctx ends or there are enough, and returns how long it took each time.
func (s *stand) wholes(ctx context.Context, gpu string, enough int) []time.Duration {
	c := s.claim(gpu)
	var took []time.Duration
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for len(took) < enough {
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

// within compares two durations of the same run.
func within(t *testing.T, what string, took, of time.Duration, limit float64) {
	t.Helper()
	ratio := float64(took) / float64(of)
	t.Logf("%s: %v of %v is %.3f, and may be %.1f", what, took.Round(10*time.Microsecond), of.Round(10*time.Microsecond), ratio, limit)
	if ratio > limit {
		t.Errorf("%s takes too long", what)
	}
}

// during prepares a whole GPU again and again while something else is done, and returns how long it took each time.
func (s *stand) during(gpu string, work func()) (took []time.Duration) {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.t.Context())
	var whole sync.WaitGroup
	whole.Go(func() { took = s.wholes(ctx, gpu, 1<<30) })
	work()
	stop()
	whole.Wait()
	return took
}

// Where the driver makes one instance at a time on all GPUs together, claims cost hardly more than that, and who wants a whole GPU does not wait.
func TestADriverThatCutsOneAtATimeIsKeptBusyAndKeepsNobodyElseWaiting(t *testing.T) {
	const samples = 150
	s := newStand(t, 9)
	s.hardware(state.CutLockDriver, cut)
	whole, claims := s.gpus[8], s.smallest(s.gpus[:8]...)
	s.claim(whole)
	alone := s.wholes(t.Context(), whole, samples)
	var took time.Duration
	meanwhile := s.during(whole, func() { took = s.atOnce(claims) })
	alone = append(alone, s.wholes(t.Context(), whole, samples)...)
	within(t, "56 claims at once, of the sum of the cuts", took, time.Duration(len(claims))*cut, 1.1)
	within(t, "a whole GPU beside them, of one alone", median(meanwhile), median(alone), 1.2)
}

// Where each GPU is cut independently, all of them together take hardly longer than one.
func TestGPUsAreCutSideBySide(t *testing.T) {
	const rounds = 3
	s := newStand(t, 8)
	s.hardware(state.CutLockGPU, cut)
	claims := s.smallest(s.gpus...)
	var one, all []time.Duration
	for i := range rounds {
		one = append(one, s.atOnce(s.smallest(s.gpus[i])))
		s.putBack()
		all = append(all, s.atOnce(claims))
		s.putBack()
	}
	within(t, "56 claims on eight GPUs at once, of seven on one", median(all), median(one), 1.3)
}

// Who wants a whole GPU meanwhile shares the disk and the processors with eight claims at every moment, and waits for no cut. What is shared of the machine
// alone is measured too: the same cuts by another plugin, with locks and records of its own, on another node of this machine.
func TestAWholeGPUWaitsForNoneOfTheCutsSideBySide(t *testing.T) {
	const rounds, samples = 6, 80
	s, other := newStand(t, 9), newStand(t, 8)
	s.hardware(state.CutLockGPU, cut)
	other.hardware(state.CutLockGPU, cut)
	whole, claims, others := s.gpus[8], s.smallest(s.gpus[:8]...), other.smallest(other.gpus...)
	s.claim(whole)
	var alone, beside, strangers []time.Duration
	for range rounds {
		alone = append(alone, s.wholes(t.Context(), whole, samples)...)
		beside = append(beside, s.during(whole, func() { s.atOnce(claims) })...)
		s.putBack()
		strangers = append(strangers, s.during(whole, func() { other.atOnce(others) })...)
		other.putBack()
	}
	within(t, "a whole GPU beside 56 cuts side by side, of one beside a stranger's", median(beside), median(strangers), 1.2)
	within(t, "a whole GPU beside 56 cuts side by side, of one alone", median(beside), median(alone), 2)
	within(t, "nineteen in twenty of these, of a cut", beside[len(beside)*19/20], cut, 0.5)
}
