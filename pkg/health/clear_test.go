package health

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

func TestAnAdminKnowsBetter(t *testing.T) {
	for _, name := range []string{whole, string(address), uuid, " x, " + whole} {
		w := watch(t, Options{})
		w.xid(79)
		w.xid(144)
		w.answer(device.Condition{Remap: &device.Remap{Pending: true}})
		w.Changes()
		unknown := w.Clear(name, "an admin says so", w.now)
		w.want(whole, Degraded) // the hardware says that itself
		if told := w.Changes(); len(told) != 2 || !told[0].Over || told[0].Why != "an admin says so" {
			t.Errorf("%s: %+v", name, told)
		}
		if want := name == " x, "+whole; slices.Equal(unknown, []string{"x"}) != want {
			t.Errorf("%s: %q", name, unknown)
		}
	}
}

func TestWhatComesAfterAnAdminsWordCounts(t *testing.T) {
	s, _ := onDisk()
	w := watch(t, Options{})
	w.xid(79)
	w.Clear(whole, "an admin says so", w.now)
	w.want(whole, Healthy)
	w.wait(time.Second)
	w.xid(79)
	w.Clear(whole, "an admin says so", w.now) // the annotation is still there
	w.want(whole, Unhealthy)
	w = w.restarted(s, Options{})
	w.Clear(whole, "an admin says so", w.now)
	w.want(whole, Unhealthy)
	w.Clear(whole+",gpu-0000-43-00-0", "an admin says so", w.now) // another one is named as well
	w.want(whole, Unhealthy)

	other := s
	other.BootID = "another"
	m := New(Options{}, w.now)
	if err := other.Load(m, w.now); err != nil {
		t.Fatal(err)
	}
	w.Monitor = m
	w.xid(79)
	w.Clear(whole, "an admin says so", w.now)
	w.want(whole, Unhealthy)

	w.Clear("", "", w.now)
	w.Clear(whole, "an admin says so", w.now)
	w.want(whole, Healthy)
}
