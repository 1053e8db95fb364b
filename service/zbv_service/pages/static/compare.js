// The schedules of the comparison.
"use strict";

globalThis.zbv.showLanes();
