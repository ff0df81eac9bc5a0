package health

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable/durabletest"
)

// oracle knows in the simplest way what must not be forgotten: for each device since when it must be at least Unhealthy.
type oracle struct {
	broken   map[string]time.Time
	recovery device.RecoveryAction
}

func (o *oracle) breaks(now time.Time, names ...string) {
	for _, n := range names {
		for _, device := range []string{n, n + "-share"} {
			if _, is := o.broken[device]; !is {
				o.broken[device] = now
			}
		}
	}
}

// TestNothingHidesWhatIsGrave plays at random what hardware may do, and compares with the oracle after each step. It also saves and loads at random
// moments: a restart must change no verdict and no time.
func TestNothingHidesWhatIsGrave(t *testing.T) {
	names := gpu.DeviceNames()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		disk := durabletest.New()
		store := Store{Disk: disk, Path: "/state/health.json", BootID: "boot"}
		w := watch(t, Options{})
		o := oracle{broken: map[string]time.Time{}}
		var story []string
		for range 120 {
			w.now = w.now.Add(time.Duration(1+r.IntN(4000)) * time.Millisecond)
			var step string
			switch r.IntN(14) {
			case 0:
				step = "xid 95"
				w.xid(95)
				o.breaks(w.now, names...)
			case 1:
				slice := uint32(r.IntN(7))
				step = fmt.Sprintf("xid 48 on slice %d", slice)
				w.xidOn(48, 19, slice, 1)
				o.breaks(w.now, fmt.Sprintf("%s-mig-19-%d", whole, slice), fmt.Sprintf("%s-mig-9-%d", whole, slice/4*4), whole+"-mig-0-0", whole)
			case 2:
				step = "errors of applications and of unknown kinds"
				w.xid(31)
				w.xidOn(43, 19, 2, 1)
				w.xid(uint64(1000 + r.IntN(50)))
			case 3:
				step = "the driver asks for a reset"
				w.recovery(device.RecoveryReset)
				o.recovery = device.RecoveryReset
				o.breaks(w.now, names...)
			case 4:
				step = "the driver asks for nothing"
				w.recovery(device.RecoveryNone)
				if o.recovery == device.RecoveryReset {
					clear(o.broken)
				}
				o.recovery = device.RecoveryNone
			case 5:
				step = "the driver does not know"
				w.recovery(device.RecoveryUnknown)
			case 6:
				step = "more errors are counted"
				w.answer(device.Condition{Uncorrected: ptr.To(uint64(w.now.Unix()))})
			case 7:
				step = "it hangs"
				w.answer(device.Condition{Reach: device.ReachWedged})
			case 8:
				step = "it fails"
				w.answer(device.Condition{Reach: device.ReachFailed})
			case 9:
				step = "a remap is pending"
				w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
			case 10:
				step = "a long time passes"
				w.wait(time.Duration(r.IntN(48)) * time.Hour)
				w.listen(w.driver)
			case 11:
				step = "the driver is loaded again"
				load := fmt.Sprint("load-", seed, w.now)
				w.listen(load)
				asks := o.recovery == device.RecoveryReset
				// What the driver asks for is asked again.
				w.recovery(o.recovery)
				clear(o.broken)
				if asks {
					o.breaks(start, names...)
				}
				w.listen(load)
			case 12:
				step = "the plugin is restarted"
				before := map[string]Verdict{}
				for _, n := range names {
					before[n] = w.of(n)
				}
				if err := store.Save(w.Monitor); err != nil {
					t.Fatal(err)
				}
				w.Monitor = New(Options{}, w.now)
				if err := store.Load(w.Monitor, w.now); err != nil {
					t.Fatal(err)
				}
				for _, n := range names {
					sameVerdict(t, n, before[n], w.of(n))
				}
				w.listen(w.driver)
			default:
				step = "all is well"
				w.ok()
			}
			story = append(story, step)
			for _, n := range names {
				v := w.of(n)
				since, is := o.broken[n]
				if is && v.State < Unhealthy || !is && v.State >= Unhealthy {
					t.Fatalf("seed %d: %s is %s (%s), broken %v, after %q", seed, n, v.State, v.Message(), is, story[max(0, len(story)-8):])
				}
				if !is || since.Equal(start) {
					continue
				}
				// Of the two causes that a state may have the first is the older.
				unhealthy := slices.IndexFunc(v.Causes, func(c Cause) bool { return c.State == Unhealthy })
				if unhealthy >= 0 && v.Causes[unhealthy].Since.After(since) {
					t.Fatalf("seed %d: %s is broken since %s, and it says %s, after %q", seed, n, since, v.Causes[unhealthy].Since, story)
				}
			}
			if n := len(w.View().Findings(address)); n > maxFindings {
				t.Fatalf("seed %d: %d findings", seed, n)
			}
		}
	}
}

func sameVerdict(t *testing.T, name string, a, b Verdict) {
	t.Helper()
	same := a.State == b.State && len(a.Causes) == len(b.Causes)
	for i := 0; same && i < len(a.Causes); i++ {
		x, y := a.Causes[i], b.Causes[i]
		same = x.Code == y.Code && x.State == y.State && x.Since.Equal(y.Since) && x.Message() == y.Message()
	}
	if !same {
		t.Errorf("%s was\n%+v and is after a restart\n%+v", name, a, b)
	}
}

func TestMoreLatchedKindsThanThereIsRoomFor(t *testing.T) {
	rules := Rules{}
	for code := range uint64(500) {
		rules[1000+code] = Breaking
	}
	w := watch(t, Options{Rules: rules})
	for code := range uint64(500) {
		w.xidOn(1000+code, 19, uint32(code%7), 1)
		w.want(fmt.Sprintf("%s-mig-19-%d", whole, code%7), Unhealthy)
	}
	// What the hardware says each time that it is asked has room all the same, and is over when it says so.
	w.counts(0, 1)
	w.answer(device.Condition{Reach: device.ReachLost})
	w.want(whole, Lost)
	w.counts(0, 2)
	w.want(whole, Unhealthy)
	w.answer(device.Condition{Reach: device.ReachNeedsReset})
	w.counts(0, 3)
	for code := range uint64(500) {
		w.xidOn(1000+code, 19, uint32(code%7), 1)
	}
	if n := len(w.View().Findings(address)); n > maxFindings {
		t.Errorf("%d findings", n)
	}
	s, _ := onDisk()
	if err := s.Save(w.Monitor); err != nil {
		t.Fatal(err)
	}
	before := w.View()
	w.Monitor = New(Options{Rules: rules}, w.now)
	if err := s.Load(w.Monitor, w.now); err != nil {
		t.Fatal(err)
	}
	for _, name := range gpu.DeviceNames() {
		n, _ := device.ParseName(name)
		sameVerdict(t, name, before.Of(gpu, n), w.of(name))
	}
	w.listen("load-1")
	w.pass(24 * time.Hour)
	for _, n := range gpu.DeviceNames() {
		w.want(n, Unhealthy)
	}
	w.recovery(device.RecoveryReset)
	w.recovery(device.RecoveryNone)
	w.want(whole, Healthy)
}
