"""The pages of the dashboard on the seeded store, by the names of their screenshots."""

from urllib.parse import quote

from perdure.urls import encode_id

PAGES = {
    "overview": "/",
    "runs": "/runs",
    "runs-failed": "/runs?q=status:failed",
    "runs-none": "/runs?q=" + quote("status:failed workflow:unknown"),
    "runs-scanned": "/runs?q=error:NeverRaised",
    "run-completed": "/runs/order-1120",
    "run-failed": "/runs/order-1121",
    "run-waiting": "/runs/order-1180",
    "run-paused": "/runs/order-1183",
    "run-suspended": "/runs/restock-190",
    "run-running": "/runs/labels-12",
    "run-queued": "/runs/invoice-77",
    "run-parallel": "/runs/catalogue-125",
    "run-parent": "/runs/newsletter-8",
    "run-child": "/runs/" + encode_id("newsletter-8/1/send/0"),
    "run-of-schedule": "/runs?q=schedule:stock-check",
    "step": "/runs/order-1121/steps?key=ship",
    "do-cancel": "/runs/order-1180/do/cancel",
    "do-complete-step": "/runs/order-1121/do/complete_step?step=ship",
    "do-rewind": "/runs/order-1121/do/rewind?step=charge",
    "do-edit-payload": "/runs/order-1121/do/edit_payload",
    "errors": "/errors",
    "agenda": "/agenda",
    "approvals": "/approvals",
    "do-approve": "/runs/order-1180/do/approve?wait=approval",
    "workflows": "/workflows",
    "workflow": "/workflows/order",
    "start": "/workflows/order/start",
    "queues": "/queues",
    "queue": "/queues/emails",
    "do-pause-queue": "/queues/emails/do/pause_queue",
    "do-set-limit": "/queues/emails/do/set_limit",
    "schedules": "/schedules",
    "schedule": "/schedules/nightly-report",
    "schedule-paused": "/schedules/weekly-newsletter",
    "do-backfill": "/schedules/nightly-report/do/backfill_schedule",
    "do-delete-schedule": "/schedules/nightly-report/do/delete_schedule",
    "workers": "/workers",
    "worker": "/workers/packing-station-2",
    "acts": "/acts",
    "views": "/views",
    "do-save-view": "/views/save?query=" + quote("status:failed since:24h"),
    "compare": "/compare?a=order-1120&b=order-1121",
    "store": "/store",
    "bulk": "/bulk/all?verb=retry&q=" + quote("status:failed"),
    "preferences": "/preferences",
}
MISSING = {"run-unknown": "/runs/order-99", "page-unknown": "/nothing"}
EMPTY = (
    *(
        "overview",
        "runs",
        "errors",
        "agenda",
        "approvals",
        "workflows",
        "queues",
        "schedules",
        "workers",
    ),
    *("acts", "store", "views"),
)
"""Pages that say what would be there when the store is empty."""
LIVE = {
    "live-overview": "/",
    "live-runs": "/runs",
    "live-run": "/runs/labels-20",
    "live-workers": "/workers",
    "live-queues": "/queues",
    "live-queue": "/queues/emails",
}
"""Pages that look different while a worker works."""
